/* What the engine watches: file descriptors in its epoll set, and what is to be done when they are
 * ready.  While the port is down, those of the port are not in the set. */
#include <errno.h>

#include "engine_internal.h"

static bool is_silent(const struct soft_source *source)
{
	return engine.silent && source->of_port;
}

static int tell_epoll(int operation, struct soft_source *source, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = source};

	if (epoll_ctl(engine.epoll_fd, operation, source->fd, &event))
		return errno;
	if (source->apart || !epoll_ctl(engine.rest_fd, operation, source->fd, &event))
		return 0;
	int rc = errno;

	if (operation == EPOLL_CTL_ADD)
		epoll_ctl(engine.epoll_fd, EPOLL_CTL_DEL, source->fd, &event);
	return rc;
}

int soft_watch(struct soft_source *source, uint32_t events)
{
	int rc = 0;

	if (source->watched && source->interest == events)
		return 0;
	if (!is_silent(source))
		rc = tell_epoll(source->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, source, events);
	if (rc)
		return rc;
	if (!source->watched) {
		source->watched = true;
		soft_list_append(&engine.sources, &source->node);
	}
	source->interest = events;
	return 0;
}

/* The step under way may have collected an event that has not been served yet. */
static void forget_event(const struct soft_source *source)
{
	for (int i = 0; i < engine.event_count; i++)
		if (engine.events[i].data.ptr == source)
			engine.events[i].data.ptr = NULL;
}

void soft_unwatch(struct soft_source *source)
{
	if (!source->watched)
		return;
	if (!is_silent(source))
		tell_epoll(EPOLL_CTL_DEL, source, 0);
	source->watched = false;
	source->interest = 0;
	soft_list_remove(&source->node);
	forget_event(source);
}

void soft_sources_silence(bool silent)
{
	soft_bells_changed();
	for (struct soft_node *node = engine.sources.next; node != &engine.sources;
	     node = node->next) {
		struct soft_source *source = soft_list_entry(node, struct soft_source, node);

		if (!source->of_port || silent == engine.silent)
			continue;
		/* What epoll had room for it has room for again. */
		tell_epoll(silent ? EPOLL_CTL_DEL : EPOLL_CTL_ADD, source, source->interest);
		if (silent)
			forget_event(source);
	}
	engine.silent = silent;
	soft_bells_changed();
}

void soft_source_set_apart(struct soft_source *source, bool apart)
{
	struct epoll_event event = {.events = source->interest, .data.ptr = source};

	if (source->apart == apart)
		return;
	/* Should the kernel refuse, it wakes in two ways; or the engine's thread alone, at first. */
	if (source->watched && !is_silent(source) &&
	    epoll_ctl(engine.rest_fd, apart ? EPOLL_CTL_DEL : EPOLL_CTL_ADD, source->fd, &event))
		return;
	source->apart = apart;
}

int soft_engine_epoll_fd(void)
{
	return engine.epoll_fd;
}
