// For programs that set AMX's tile registers and are compiled by GCC 12: its _tile_loadconfig says that 8 of the 64 bytes
// are read, so stores of the others may come too late, and the program ends with a general protection fault.
#pragma once
#if defined(__cplusplus) && defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#include <immintrin.h>
#define _tile_loadconfig(config) \
  (__extension__({ asm volatile("ldtilecfg %X0" : : "m"(*(const char(*)[64])(config)) : "memory"); }))
#endif
