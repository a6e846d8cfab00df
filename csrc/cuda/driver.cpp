#include "driver.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>

namespace kvplan::cuda {

namespace {

// As cuda.h declares them (driver API 12.0 and later); repeated so that no CUDA headers are needed to build.
using Result = int;
using Handle = void*;
constexpr int kSuccess = 0;
constexpr int kMultiprocessorCount = 16;    // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kDevicePointer = 3;           // CU_POINTER_ATTRIBUTE_DEVICE_POINTER

struct Driver {
  Result (*get_error_string)(Result, const char**) = nullptr;
  Result (*library_load)(Handle*, const void*, void*, void*, unsigned, void*, void*, unsigned) = nullptr;
  Result (*library_get_kernel)(Handle*, Handle, const char*) = nullptr;
  Result (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**,
                   void**) = nullptr;
  Result (*memset_d8)(uint64_t, unsigned char, size_t, Handle) = nullptr;
  Result (*device_get)(int*, int) = nullptr;
  Result (*device_attribute)(int*, int, int) = nullptr;
  Result (*pointer_attribute)(void*, int, uint64_t) = nullptr;
  Result (*init)(unsigned) = nullptr;
  Result (*current_context)(Handle*) = nullptr;
  Result (*retain_context)(Handle*, int) = nullptr;
  Result (*set_context)(Handle) = nullptr;
  std::string missing;

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing = "libcuda.so.1 does not load";
      return;
    }
    const auto find = [&](auto* function, const char* name) {
      *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(dlsym(library, name));
      if (*function == nullptr) missing = std::string("the CUDA driver has no ") + name + "; it must be 12.0 or later";
    };
    find(&get_error_string, "cuGetErrorString");
    find(&library_load, "cuLibraryLoadData");
    find(&library_get_kernel, "cuLibraryGetKernel");
    find(&launch, "cuLaunchKernel");
    find(&memset_d8, "cuMemsetD8Async");
    find(&device_get, "cuDeviceGet");
    find(&device_attribute, "cuDeviceGetAttribute");
    find(&pointer_attribute, "cuPointerGetAttribute");
    find(&init, "cuInit");
    find(&current_context, "cuCtxGetCurrent");
    find(&retain_context, "cuDevicePrimaryCtxRetain");
    find(&set_context, "cuCtxSetCurrent");
  }

  std::string words(Result result) const {
    const char* text = nullptr;
    if (get_error_string(result, &text) != kSuccess || text == nullptr) text = "unknown error";
    return std::string(text) + " (" + std::to_string(result) + ")";
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

void check(Result result, const char* what) {
  if (result != kSuccess) throw std::runtime_error(std::string("CUDA driver: ") + what + ": " + driver().words(result));
}

std::mutex loading;
std::array<Handle, kKernels> kernels{};
std::atomic<const void*> image{nullptr};
std::atomic<bool> loaded{false};

void load_kernels() {
  const std::lock_guard<std::mutex> lock(loading);
  if (loaded) return;
  if (image == nullptr) throw std::runtime_error("no CUDA kernels are here; `python -m kvplan doctor` tells why");
  Handle library = nullptr;
  Result result = driver().library_load(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
  for (int i = 0; i < kKernels && result == kSuccess; ++i)
    result = driver().library_get_kernel(&kernels[static_cast<size_t>(i)], library, kKernelNames[i]);
  if (result != kSuccess)
    throw std::runtime_error("the CUDA driver does not take kvplan's kernels: " + driver().words(result) +
                             "; KVPLAN_BACKEND=triton does without them");
  loaded = true;
}

}  // namespace

void use_kernels(const void* code) { image = code; }

void prepare(int device) {
  if (!driver().missing.empty()) throw std::runtime_error(driver().missing);
  if (!loaded) check(driver().init(0), "initialization");
  Handle context = nullptr;
  check(driver().current_context(&context), "current context");
  if (context == nullptr) {
    int handle = 0;
    check(driver().device_get(&handle, device), "device");
    check(driver().retain_context(&context, handle), "primary context");  // torch's own, which lives as long as it
    check(driver().set_context(context), "context");
  }
  if (!loaded) load_kernels();
}

uint64_t mapped(const void* host) {
  uint64_t address = 0;
  if (!driver().missing.empty()) return 0;
  const Result result = driver().pointer_attribute(&address, kDevicePointer, reinterpret_cast<uint64_t>(host));
  return result == kSuccess ? address : 0;
}

int64_t processors(int device) {
  static std::array<std::atomic<int>, 64> known{};  // asked once a device
  if (device < 0 || static_cast<size_t>(device) >= known.size()) throw std::runtime_error("no such CUDA device");
  int count = known[static_cast<size_t>(device)];
  if (count == 0) {
    int handle = 0;
    check(driver().device_get(&handle, device), "device");
    check(driver().device_attribute(&count, kMultiprocessorCount, handle), "multiprocessor count");
    known[static_cast<size_t>(device)] = count;
  }
  return count;
}

void fill(void* stream, void* at, int byte, int64_t nbytes) {
  if (nbytes == 0) return;
  check(driver().memset_d8(reinterpret_cast<uint64_t>(at), static_cast<unsigned char>(byte), static_cast<size_t>(nbytes),
                           stream),
        "memset");
}

void run(void* stream, Kernel kernel, int64_t blocks, void* args) {
  // A CUkernel is taken in place of a CUfunction, and runs in the current context.
  const auto number = static_cast<size_t>(kernel);
  check(driver().launch(kernels[number], static_cast<unsigned>(blocks), 1, 1, kThreads, 1, 1, 0, stream, &args, nullptr),
        kKernelNames[number]);
}

}  // namespace kvplan::cuda
