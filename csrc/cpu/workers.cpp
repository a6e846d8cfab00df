#include "workers.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace kvplan::cpu {

namespace {

class Work {
 public:
  Work(int64_t pieces, const std::function<void(int64_t)>& body) : pieces_(pieces), body_(body) {}

  // Takes pieces until none is left. A thread that comes late finds none, and touches nothing of the caller's.
  void take_pieces() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < pieces_;) {
      body_(i);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 < pieces_) continue;
      const std::lock_guard<std::mutex> lock(mutex_);
      all_done_.notify_one();
    }
  }

  // For the caller, who has found no piece left: all others have been begun.
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [&] { return done_.load(std::memory_order_acquire) == pieces_; });
  }

 private:
  const int64_t pieces_;
  const std::function<void(int64_t)>& body_;  // the caller's, who stays until every piece is done
  std::atomic<int64_t> next_{0}, done_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
};

class Pool {
 public:
  const pid_t process = getpid();

  // Asks `helpers` workers to take pieces; fewer where threads cannot be had. The caller does not wait for the lock.
  void offer(const std::shared_ptr<Work>& work, int64_t helpers) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    while (workers_ < helpers && add_worker()) ++workers_;
    for (int64_t i = 0; i < std::min(helpers, workers_); ++i) offers_.push_back(work);
    offered_.notify_all();
  }

  // Drops the offers that no worker has taken up.
  void withdraw(const std::shared_ptr<Work>& work) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) offers_.erase(std::remove(offers_.begin(), offers_.end(), work), offers_.end());
  }

 private:
  bool add_worker() {
    // Signals are for the threads that the process knows.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool added = true;
    try {
      std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      added = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return added;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      offered_.wait(lock, [&] { return !offers_.empty(); });
      const std::shared_ptr<Work> work = std::move(offers_.front());
      offers_.pop_front();
      lock.unlock();
      work->take_pieces();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable offered_;
  std::deque<std::shared_ptr<Work>> offers_;
  int64_t workers_ = 0;
};

std::atomic<int64_t> threads_wanted{1};
std::atomic<Pool*> current_pool{nullptr};

// Never destroyed: its threads run to the end of the process.
Pool& pool() {
  Pool* found = current_pool.load(std::memory_order_acquire);
  if (found != nullptr && found->process == getpid()) return *found;
  // None yet, or that of the process this one was forked from: its threads are not here, and its lock may be held.
  auto* made = new Pool;
  if (current_pool.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *found;
}

}  // namespace

void set_num_threads(int64_t n) { threads_wanted.store(n, std::memory_order_relaxed); }
int64_t num_threads() { return threads_wanted.load(std::memory_order_relaxed); }

void for_each_piece(int64_t pieces, int64_t threads, const std::function<void(int64_t)>& body) {
  const int64_t helpers = std::min(threads, pieces) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < pieces; ++i) body(i);
    return;
  }
  const auto work = std::make_shared<Work>(pieces, body);
  Pool& workers = pool();
  workers.offer(work, helpers);
  work->take_pieces();
  workers.withdraw(work);
  work->wait();
}

}  // namespace kvplan::cpu
