/* The kept inputs of tests/fuzz/fuzz_cm.c, with any compiler. */
#define FUZZ_CORPUS "../fuzz/corpus/fuzz_cm"
#include "../fuzz/fuzz_cm.c"
