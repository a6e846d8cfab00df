#!/bin/sh
# Mooncake's wheels load libibverbs.so.1 even where only TCP is used. Install it where that is missing and permitted.
set -u
present() { ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' || ls /usr/lib/*/libibverbs.so.1 >/dev/null 2>&1; }
present && exit 0
line="apt-get update && apt-get install -y libibverbs1"
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  echo "== installing libibverbs1"
  { apt-get update -qq && apt-get install -y -qq libibverbs1; } >/dev/null 2>&1
  present && exit 0
fi
echo "libibverbs.so.1 is missing, which the Mooncake engine needs. Type as root: $line" >&2
exit 1
