/* Stores the reasons for refusing calls other than post calls, and records them in the trace. */
#include <errno.h>

#include "trace.h"

static _Thread_local struct soft_refusal_note thread_note;

int soft_refuse(int error, const char *reason)
{
	thread_note = (struct soft_refusal_note){.reason = reason, .error = error};
	return error;
}

int soft_refuse_value(const char *reason, const char *field, uint64_t value)
{
	soft_refuse(EINVAL, reason);
	thread_note.field = field;
	thread_note.value = value;
	return EINVAL;
}

int soft_refuse_attributes(const char *reason, uint32_t attributes)
{
	soft_refuse(EINVAL, reason);
	thread_note.attributes = attributes;
	return EINVAL;
}

int soft_check_limits(const struct soft_limit *limits, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		if (limits[i].value <= limits[i].max)
			continue;
		soft_refuse_value("LIMIT", limits[i].field, limits[i].value);
		thread_note.limit = limits[i].max;
		return EINVAL;
	}
	return 0;
}

struct soft_refusal_note soft_refusal_take(int error)
{
	struct soft_refusal_note note = {0};

	if (thread_note.reason && thread_note.error == error)
		note = thread_note;
	thread_note.reason = NULL;
	return note;
}

int soft_call_result(const char *call, const char *owner, uint32_t number, int error)
{
	const int before = errno;
	const struct soft_refusal_note note = soft_refusal_take(error);

	if (error) {
		soft_lock();
		SOFT_TRACE(call_refused, call, owner, number, error, &note);
		soft_unlock();
	}
	errno = before;
	return error;
}

void *soft_call_pointer_result(const char *call, const char *owner, uint32_t number, void *object)
{
	soft_call_result(call, owner, number, object ? 0 : errno);
	return object;
}
