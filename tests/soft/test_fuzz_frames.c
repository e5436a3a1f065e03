/* The kept inputs of tests/fuzz/fuzz_frames.c, with any compiler. */
#define FUZZ_CORPUS "../fuzz/corpus/fuzz_frames"
#include "../fuzz/fuzz_frames.c"
