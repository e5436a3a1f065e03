/* A hash table with open addressing that maps random 32-bit numbers (memory keys and queue pair
 * numbers) to objects.
 *
 * The numbers come from getrandom(2), so their low bits serve as the hash. They must be hard to
 * guess, because an rkey is a bearer token: any peer that knows it can use it.
 */

#include "objects.h"

/* Returns the slot of the key, or the empty slot to which the key can be added. */
static struct soft_table_slot *slot_of(const struct soft_table *table, uint32_t key)
{
	uint32_t at = key & (table->capacity - 1);

	while (table->slots[at].key && table->slots[at].key != key)
		at = (at + 1) & (table->capacity - 1);
	return &table->slots[at];
}

void *soft_table_find(const struct soft_table *table, uint32_t key)
{
	if (!table->capacity || !key)
		return NULL;
	return slot_of(table, key)->object;
}

static int grow(struct soft_table *table)
{
	struct soft_table larger = {.capacity = table->capacity ? table->capacity * 2 : 64};

	larger.slots = calloc(larger.capacity, sizeof(*larger.slots));
	if (!larger.slots)
		return ENOMEM;
	for (uint32_t i = 0; i < table->capacity; i++)
		if (table->slots[i].key)
			*slot_of(&larger, table->slots[i].key) = table->slots[i];
	free(table->slots);
	larger.count = table->count;
	*table = larger;
	return 0;
}

int soft_table_put(struct soft_table *table, uint32_t key, void *object)
{
	/* Keep the table at most half full, so that searches are short and always end at an empty
	 * slot. */
	if (table->count * 2 >= table->capacity) {
		int rc = grow(table);

		if (rc)
			return rc;
	}
	*slot_of(table, key) = (struct soft_table_slot){.key = key, .object = object};
	table->count++;
	return 0;
}

int soft_table_add(struct soft_table *table, void *object, uint32_t mask, uint32_t *key)
{
	do {
		if (soft_device.platform->random(key, sizeof(*key), 0) != sizeof(*key))
			return errno;
		*key &= mask;
	} while (!*key || soft_table_find(table, *key));
	return soft_table_put(table, *key, object);
}

void soft_table_remove(struct soft_table *table, uint32_t key)
{
	if (!soft_table_find(table, key))
		return;
	uint32_t mask = table->capacity - 1;
	uint32_t hole = (uint32_t)(slot_of(table, key) - table->slots);

	/* Searches end at an empty slot, so the hole must not separate an entry from its home slot.
	 * Move the next such entry into the hole, and continue with the slot that it leaves. */
	for (uint32_t at = (hole + 1) & mask; table->slots[at].key; at = (at + 1) & mask) {
		uint32_t home = table->slots[at].key & mask;

		if (((at - home) & mask) >= ((at - hole) & mask)) {
			table->slots[hole] = table->slots[at];
			hole = at;
		}
	}
	table->slots[hole] = (struct soft_table_slot){0};
	if (--table->count == 0) {
		free(table->slots);
		*table = (struct soft_table){0};
	}
}
