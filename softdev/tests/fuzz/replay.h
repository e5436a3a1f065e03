/* Run the stored corpus without a fuzzer, so that any compiler can build the target. Each input
 * runs unchanged and then with several mutations, which are the same in every run. */
#pragma once

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

enum { REPLAY_MAX = 64 * RECORD, VARIATIONS = 4 };

static uint64_t replay_state = 1;

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size)
{
	if (!size && max_size)
		data[size++] = 0;
	if (size)
		data[fuzz_next(&replay_state) % size] ^=
			(uint8_t)(1u << fuzz_next(&replay_state) % 8);
	return size;
}

static void replay_variations(const uint8_t *data, size_t size)
{
	uint8_t changed[REPLAY_MAX];

	for (int i = 0; i < VARIATIONS; i++) {
		size_t length = size;

		memcpy(changed, data, size);
		for (uint64_t n = fuzz_next(&replay_state) % 4; n < 4; n++)
			length = LLVMFuzzerCustomMutator(changed, length, sizeof(changed),
							 (unsigned)fuzz_next(&replay_state));
		LLVMFuzzerTestOneInput(changed, length);
	}
}

int main(void)
{
	struct dirent **names;
	int count = scandir(FUZZ_CORPUS, &names, NULL, alphasort), inputs = 0;

	limit_seconds(110);
	CHECK(count > 0);
	for (int i = 0; i < count; free(names[i++])) {
		static char path[4096];
		static uint8_t data[REPLAY_MAX];
		size_t size;
		FILE *file;

		if (names[i]->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "%s/%s", FUZZ_CORPUS, names[i]->d_name);
		current_step = path;
		CHECK(file = fopen(path, "rb"));
		size = fread(data, 1, sizeof(data), file);
		fclose(file);
		LLVMFuzzerTestOneInput(data, size);
		replay_variations(data, size);
		inputs++;
	}
	free(names);
	CHECK(inputs > 0);
	printf("%d inputs of %s, and %d variations of each\n", inputs, FUZZ_CORPUS, VARIATIONS);
	return 0;
}
