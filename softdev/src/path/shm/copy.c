/* Copies into and out of rings (copy.h).
 *
 * The C library copies long data with `rep movsb`, which does not fetch the cache lines that it
 * overwrites. While one side reads from a ring with this instruction, writes by the other side can
 * take four times as long. This was sometimes observed on Zen 5 between cores that share a cache.
 * On Zen 3 and 4, `rep movsb` is always slow (glibc bug 30994, fixed in newer versions). Reading a
 * ring with ordinary loads and stores is 20 to 33 % faster on these processors.
 */
#include <string.h>

#include "copy.h"

enum {
	LONG = 4096, /* minimum length for which the C library uses rep movsb */
	LINE = 64,
};

#ifdef __x86_64__
#include <cpuid.h>

/* Returns whether this is an AMD Zen 3 or Zen 4 processor, where `rep movsb` is always slow. */
static bool is_zen_3_or_4(void)
{
	unsigned eax, ebx, ecx, edx;

	if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx ||
	    ecx != signature_AMD_ecx || edx != signature_AMD_edx ||
	    !__get_cpuid(1, &eax, &ebx, &ecx, &edx))
		return false;
	return (eax >> 8 & 15) + (eax >> 20 & 255) ==
	       0x19; /* processor family (AMD64 manual 3, E.3.2) */
}

/* Choose the method of soft_copy() for this processor when the process starts. */
__attribute__((constructor)) static void choose(void)
{
	soft_copy_avoids_movsb = is_zen_3_or_4();
}
#endif

bool soft_copy_avoids_movsb;

void soft_copy_by_loads(uint8_t *to, const uint8_t *from, size_t length)
{
#ifdef __x86_64__
	for (; length >= LINE; length -= LINE, to += LINE, from += LINE) {
		memcpy(to, from, LINE);
		__asm__ volatile(
			""
			:
			:
			: "memory"); /* compiler barrier against merging the loop into one memcpy */
	}
#endif
	memcpy(to, from, length);
}

void soft_copy(uint8_t *to, const uint8_t *from, size_t length)
{
	if (length >= LONG && soft_copy_avoids_movsb)
		soft_copy_by_loads(to, from, length);
	else
		memcpy(to, from, length);
}
