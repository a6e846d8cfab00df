// All device code, for nvcc and NVRTC. What launches it is launch.h.
#include "copy.cuh"
#include "descriptors.cuh"
#include "pages.cuh"
#include "runs.cuh"
