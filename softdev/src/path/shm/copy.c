/* See copy.h.
 *
 * The C library copies what is long with `rep movsb`, which fetches nothing that it overwrites.  But
 * where that takes bytes out of a ring, the side that writes there may be four times as slow for as
 * long as the two go on (seen on Zen 5, between cores with a common cache; by chance), and on Zen 3
 * and 4 it is slow by itself, as glibc has found too (its bug 30994, mended in newer ones): by loads
 * and stores a ring is read a fifth to a third quicker there.
 */
#include <string.h>

#include "copy.h"

enum {
	LONG = 4096, /* from about here on the C library does it */
	LINE = 64,
};

#ifdef __x86_64__
#include <cpuid.h>

static bool is_zen_3_or_4(void)
{
	unsigned eax, ebx, ecx, edx;

	if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx ||
	    ecx != signature_AMD_ecx || edx != signature_AMD_edx ||
	    !__get_cpuid(1, &eax, &ebx, &ecx, &edx))
		return false;
	return (eax >> 8 & 15) + (eax >> 20 & 255) == 0x19; /* AMD64 manual 3, E.3.2: the family */
}

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
		__asm__ volatile("" : : : "memory"); /* else they become one memcpy again */
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
