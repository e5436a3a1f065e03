/* The kept inputs of tests/fuzz/fuzz_datagrams.c, with any compiler. */
#define FUZZ_CORPUS "../fuzz/corpus/fuzz_datagrams"
#include "../fuzz/fuzz_datagrams.c"
