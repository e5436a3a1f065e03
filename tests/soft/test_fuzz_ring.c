/* The kept inputs of tests/fuzz/fuzz_ring.c, with any compiler. */
#define FUZZ_CORPUS "../fuzz/corpus/fuzz_ring"
#include "../fuzz/fuzz_ring.c"
