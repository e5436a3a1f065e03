/* Replaces _exit in builds with coverage (meson.build). Forked children exit through _exit, which
 * would not save their coverage data. */
#include <stdnoreturn.h>

void __gcov_dump(void);
noreturn void __real__exit(int status);
noreturn void __wrap__exit(int status);

noreturn void __wrap__exit(int status)
{
	__gcov_dump();
	__real__exit(status);
}
