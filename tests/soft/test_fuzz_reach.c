/* The kept inputs of tests/fuzz/fuzz_reach.c, with any compiler. */
#define FUZZ_CORPUS "../fuzz/corpus/fuzz_reach"
#include "../fuzz/fuzz_reach.c"
