// One binary for every x86-64 machine: the loader takes the widest version of a marked function that the processor runs.
#pragma once
#include <cstdint>  // defines __GLIBC__, whose loader can choose

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(KVPLAN_NO_CLONES)
#define KVPLAN_CAN_CHOOSE
#define KVPLAN_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define KVPLAN_CLONES
#endif
