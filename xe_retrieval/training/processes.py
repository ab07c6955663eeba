"""One program as one process or as many: how they find, await and ask each other."""

import contextlib
import os

import jax
import numpy as np
import orbax.checkpoint as ocp

from xe_retrieval.training import mesh as mesh_lib

PATIENCE = 24 * 3600  # seconds: what one process does for all (features, data) may take a while


def join(cluster: bool = False) -> None:
  """Before the first use of a device: becomes one of several processes, if there are several.

  launch/local_processes.sh and launch/kubernetes.yaml set JAX_COORDINATOR_ADDRESS,
  JAX_NUM_PROCESSES and JAX_PROCESS_ID. With `cluster`, JAX asks SLURM or the TPU pod instead.
  """
  count = int(os.environ.get("JAX_NUM_PROCESSES", 1))
  virtual = jax.config.jax_num_cpu_devices > 1 or "device_count" in os.environ.get("XLA_FLAGS", "")
  if count > 1 or virtual:
    # Collectives of CPU devices block a thread of XLA's pool, which has one per core: several
    # programs at once can starve each other and abort. So more threads, one program at a time.
    os.environ.setdefault("NPROC", "32")
    jax.config.update("jax_cpu_enable_async_dispatch", False)
  if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address, index = os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(address, count, index)
  elif cluster:
    jax.distributed.initialize()


def first() -> bool:
  """The process that writes and speaks for all."""
  return jax.process_index() == 0


@contextlib.contextmanager
def one_after_the_other(name: str):
  """The first process runs the block before the others do: what it left on disk, they find."""
  several = jax.process_count() > 1
  wait = ocp.multihost.get_barrier_sync_fn() if several else None
  if several and not first():
    wait(key=name, timeout_ms=1000 * PATIENCE)
  yield
  if several and first():
    wait(key=name, timeout_ms=1000 * PATIENCE)


def anyone(mesh):
  """ask(flag) -> bool []: whether any process said True; the same in all, and without waiting."""
  rows, everywhere = mesh_lib.rows(mesh), mesh_lib.everywhere(mesh)
  some = jax.jit(lambda flags: flags.any(), out_shardings=everywhere)

  def ask(flag):
    here = np.full(len(mesh.local_devices), flag)
    return some(jax.make_array_from_process_local_data(rows, here))

  return ask
