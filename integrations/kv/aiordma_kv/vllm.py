"""A secondary tier of vLLM's KV-cache offloading.

An entry of `secondary_tiers` in the configuration of vLLM's offloading connector selects it:

{"type": "Tier", "module_path": "aiordma_kv.vllm", "servers": ["HOST:PORT"]}
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from hashlib import blake2b
from itertools import compress
from typing import Any

from . import ThreadClient
from .common import read_key


def _unsupported(problem: object) -> ImportError:
    return ImportError(
        f"aiordma_kv.vllm was tested with vLLM 0.32.0 and does not work here: {problem}; "
        "pip install vllm==0.32.0"
    )


try:
    import vllm
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as error:
    raise _unsupported(error) from error

logger = logging.getLogger("aiordma_kv.vllm")

Verdicts = dict[OffloadKey, LookupResult]
"""The results of one request's lookups. Each HIT holds a lock."""
Lookup = tuple[Verdicts, OffloadKey]
"""A key that a request has looked up, and the results to which it belongs."""


class Tier(SecondaryTierManager):
    """Blocks of the primary tier on servers that several engines share.

    vLLM's scheduler calls the methods. Only `drain_jobs` and `shutdown` wait for the servers.

    The first lookup of a key returns RETRY. One call at the end of the step locates and locks all
    the keys that were new in it. A load takes over the locks of its blocks. The other locks end
    with the step whose lookup returned HIT, or with their request.

    Args:
        offloading_spec: The specification of vLLM's offloading.
        primary_kv_view: The memory of the primary tier, with one row for each block.
        tier_type: The name of the tier in vLLM's metrics.
        servers: The servers, each as "HOST:PORT".
        namespace: A name that separates blocks that vLLM cannot tell apart, such as those of two
            revisions of a model. Only engines with the same model, KV-cache layout, parallelism and
            version of vLLM share blocks in any case.
        auth_file: A file that contains the pre-shared key of the servers.
        locality: "LOCAL" or "REMOTE", for requests that limit the tiers they load from.
        backpressure_detector: An argument of vLLM's base class.
        options: Other arguments of `ThreadClient`.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        servers: Sequence[str],
        namespace: str = "",
        auth_file: str | None = None,
        locality: str | None = None,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else base.Locality(locality)
        self._prefix = _key_prefix(namespace, offloading_spec.config)
        self._memory = primary_kv_view.cast("B")
        self._verdicts: dict[str, Verdicts] = {}  # by request
        self._new_lookups: list[Lookup] = []
        self._lookups: dict[Future[list[bool]], list[Lookup]] = {}
        self._hits_this_step: list[Lookup] = []
        self._finished: list[str] = []
        self._jobs: dict[Future[list[bool]], tuple[TransferJob, list[OffloadKey]]] = {}
        auth = read_key(auth_file)
        self._client = ThreadClient(servers, memory=self._memory, auth=auth, **options)

    def on_new_request(self, req_context: ReqContext) -> base.RequestOffloadingContext:
        """Return vLLM's default policy."""
        return base.RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT, MISS, or RETRY if the servers have not yet replied."""
        self._settle_lookups()
        verdicts = self._verdicts.setdefault(req_context.req_id, {})
        if key not in verdicts:
            verdicts[key] = LookupResult.RETRY
            self._new_lookups.append((verdicts, key))
        elif verdicts[key] is LookupResult.HIT:
            self._hits_this_step.append((verdicts, key))
        return verdicts[key]

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Release the locks of a request at the end of the step, which may still load blocks."""
        self._finished.append(req_context.req_id)

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        """Release locks that no load has taken over, and locate the step's new keys."""
        self._settle_lookups()
        unused, self._hits_this_step = self._hits_this_step, []
        for request in self._finished:
            verdicts = self._verdicts.pop(request, {})
            unused += [(verdicts, key) for key in verdicts]
        self._finished.clear()
        self._unlock(
            [key for verdicts, key in unused if verdicts.pop(key, None) is LookupResult.HIT]
        )
        lookups = [(verdicts, key) for verdicts, key in self._new_lookups if key in verdicts]
        self._new_lookups.clear()
        if lookups:
            self._lookups[self._client.locate(self._names(key for _, key in lookups))] = lookups

    def has_pending_work(self) -> bool:
        """Return whether a later step has to release locks."""
        return bool(self._lookups or self._finished)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start storing blocks."""
        names, blocks = self._names(job_metadata.keys), self._blocks(job_metadata)
        self._jobs[self._client.put(names, blocks)] = job_metadata, []

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start loading blocks for which this request's lookups returned HIT."""
        verdicts = self._verdicts.get(job_metadata.req_context.req_id, {})
        locked = [key for key in job_metadata.keys if verdicts.pop(key, None) is LookupResult.HIT]
        names, blocks = self._names(job_metadata.keys), self._blocks(job_metadata)
        self._jobs[self._client.get(names, blocks)] = job_metadata, locked

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of the jobs that ended since the last call."""
        results = []
        for future in [future for future in self._jobs if future.done()]:
            job, locked = self._jobs.pop(future)
            self._unlock(locked)
            succeeded = list(compress(job.keys, _results(future, len(job.keys))))
            result = JobResult(job.job_id, success=len(succeeded) == len(job.keys))
            if job.is_promotion:
                result.successful_keys = succeeded
                # Otherwise vLLM would try forever to load a block that is lost.
                verdicts = self._verdicts.get(job.req_context.req_id, {})
                for key in set(job.keys).difference(succeeded):
                    verdicts.setdefault(key, LookupResult.MISS)
            results.append(result)
        return results

    def drain_jobs(self) -> None:
        """Wait until every job has ended. Servers that stop responding add `timeout` seconds."""
        wait(list(self._jobs))

    def shutdown(self) -> None:
        """Wait until every job has ended, and close the connections, which releases all locks."""
        self._client.close()
        self._memory.release()

    def _settle_lookups(self) -> None:
        """Record the results of the lookups that the servers have answered."""
        for future in [future for future in self._lookups if future.done()]:
            unused = []
            lookups = self._lookups.pop(future)
            for (verdicts, key), found in zip(lookups, _results(future, len(lookups)), strict=True):
                if key in verdicts:
                    verdicts[key] = LookupResult.HIT if found else LookupResult.MISS
                elif found:
                    unused.append(key)
            self._unlock(unused)

    def _unlock(self, keys: list[OffloadKey]) -> None:
        if keys:
            self._client.unlock(self._names(keys))

    def _names(self, keys: Iterable[OffloadKey]) -> list[bytes]:
        return [self._prefix + key for key in keys]

    def _blocks(self, job: TransferJob) -> list[memoryview]:
        starts = [int(chunk) * self.block_size_bytes for chunk in job.chunk_ids]
        return [self._memory[start : start + self.block_size_bytes] for start in starts]


def _results(future: Future[list[bool]], count: int) -> list[bool]:
    """Return the results of a call for `count` keys, all False if it raised an exception."""
    error = future.exception()
    if error is None:
        return future.result()
    logger.error("call failed", exc_info=error)
    return [False] * count


def _key_prefix(namespace: str, config: OffloadingConfig) -> bytes:
    """Return the prefix of the keys of all engines that store the same bytes under a key."""
    is_portable = config.parallel.is_parallelism_agnostic or config.replicated_layout
    sizes = [] if is_portable else ["tp_size", "pp_size", "pcp_size", "dcp_size"]
    parallel = [getattr(config.parallel, size) for size in sizes]
    layout = (config.replicated_layout, config.canonical_layout, config.kv_cache_layout)
    engine = (vllm.__version__, config.model, config.cache, config.groups, parallel, layout)
    return blake2b(repr((namespace, engine)).encode(), digest_size=16).digest()


def _check_interface() -> None:
    """Raise an exception if this release of vLLM has another interface than the tier needs."""
    needed: dict[Any, str] = {
        LookupResult: "RETRY",
        base: "ScheduleEndContext",
        SecondaryTierManager: "on_schedule_end",
        TransferJob: "chunk_ids",
        JobResult: "successful_keys",
        OffloadingConfig: "kv_cache_layout",
    }
    for owner, name in needed.items():
        if not hasattr(owner, name) and name not in owner.__annotations__:
            raise _unsupported(f"{owner.__name__} has no {name}")
    if missing := ", ".join(sorted(Tier.__abstractmethods__)):
        raise _unsupported(f"SecondaryTierManager requires {missing}")


_check_interface()
