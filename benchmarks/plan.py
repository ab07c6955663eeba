"""Predictions of xe_retrieval.plan against counts by hand and measurements on a CPU.

  python -m benchmarks.plan [--only=flops,memory,mining]
  python -m benchmarks.plan --only=table,million     # needs libtpu; a step compiles for minutes

flops    the paper's towers at full size: FLOPs of the compiled step against a count by hand.
memory   the same step: predicted bytes against the peak of a process that runs it.
mining   trip counts of the loops of exact mining, which depend on the scores; the planner assumes
         costs.MEASURED_TRIPS.
table    configs/cc.py for three sizes of a pod and three losses: batch 512 as it is, and 32,768 in
         bfloat16 with the streaming loss, in micro-batches of 128 pairs per chip.
million  the loss alone at batch 1,048,576 on 256 chips.
"""

import argparse
import collections
import ctypes
import gc
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.train import paper, random_batch
from xe_retrieval.data import mesh
from xe_retrieval.losses import pair_scores, selection
from xe_retrieval.planning import chips, costs, plans
from xe_retrieval.training import step

BATCH = 4


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--only", default="flops,memory,mining")
  parser.add_argument("--cache", default="", help="directory to keep compiled programs in")
  args = parser.parse_args()
  if "XE_MEMORY" in os.environ:
    return print(_peak())
  with tempfile.TemporaryDirectory() as nowhere:
    os.environ["XDG_CACHE_HOME"] = args.cache or nowhere
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{args.cache or nowhere}/jax"  # of both subprocesses
    for name in args.only.split(","):
      parts = {"flops": flops, "memory": memory, "mining": mining}
      (parts | {"table": table, "million": million})[name]()


def config():
  chosen = paper(size=224, tokens=32)
  chosen.loss, chosen.batch_size = "cross_example_softmax", BATCH
  return chosen


def flops():
  plan = plans.make(config(), "cpu:1", say=_note)
  found = {name: plan.counted.parts[f"{name} tower"].flops / BATCH for name in ("text", "image")}
  for name, by_hand in (("text", _bert()), ("image", _resnet())):
    print(
      f"flops, {name} tower, forward and backward: {found[name] / 1e9:.2f} G per pair, by hand "
      f"{by_hand / 1e9:.2f} G; ratio {found[name] / by_hand:.3f} (target 0.95 to 1.05)"
    )


def _resnet():
  """He et al.: 4.1 G multiplications per image of 224²; pixels get no gradient (7x7 at 112²)."""
  forward, first = 2 * 4.1e9, 2 * 112 * 112 * 7 * 7 * 3 * 64
  return 3 * forward - first


def _bert(layers=12, width=768, tokens=32):
  """Per layer 12 width² weights and two products of attention; only CLS leaves the last layer."""
  whole = 2 * tokens * 12 * width**2 + 2 * 2 * tokens**2 * width
  last = 2 * tokens * 2 * width**2 + 2 * 10 * width**2 + 2 * 2 * tokens * width
  return 3 * ((layers - 1) * whole + last)


def memory():
  plan = plans.make(config(), "cpu:1", say=_note)
  command = [sys.executable, "-m", "benchmarks.plan"]
  out = subprocess.run(
    command, check=True, env=dict(os.environ, XE_MEMORY="1"), capture_output=True, text=True
  )
  measured = float(out.stdout.split()[-1])
  print(
    f"memory, batch {BATCH} on one CPU device: predicted {plan.used / 2**30:.2f} GiB, measured "
    f"{measured / 2**30:.2f} GiB at its peak; ratio {plan.used / measured:.3f} (target 0.8 to 1.2)"
  )


def _peak():
  """Peak bytes of state, batch and one step, above those of the process before."""
  built = step.build(config(), mesh.make(jax.devices()[:1]))
  compiled = built.lower().compile()
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)  # return what compiling used
  before = _status("VmRSS")
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # reset the peak
  zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)  # noqa: E731
  state = jax.tree.map(zeros, built.state)
  batch = jax.device_put(random_batch(config()), mesh.rows(mesh.make(jax.devices()[:1])))
  jax.block_until_ready(compiled(state, batch))
  return _status("VmHWM") - before


def _status(name):
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def mining():
  """On one device, with the selection's loops wrapped to count their trips."""
  for name, (text, image) in _embeddings(4_096).items():
    trips = _trips(text, image)
    print(f"mining, N = 4,096, {name}: " + ", ".join(f"{k} {v}" for k, v in trips.items()))
  print(f"mining: planned with {costs.MEASURED_TRIPS}")


def _trips(text, image):
  """Scope of a loop -> trip count."""
  seen = collections.Counter()
  plain = selection.lax.while_loop, selection.lax.fori_loop

  def name():
    around = jax._src.source_info_util.current_name_stack().stack
    return around[-1].name if around else ""

  def counted(body, scope):
    def round(*state):
      jax.debug.callback(lambda: seen.update([scope]))
      return body(*state)

    return round

  selection.lax.while_loop = lambda test, body, start: plain[0](test, counted(body, name()), start)
  selection.lax.fori_loop = lambda a, b, body, start: plain[1](a, b, counted(body, name()), start)
  ids = (jnp.arange(len(text), dtype=jnp.int32),)
  x, y = 20 * pair_scores.normalize(text), pair_scores.normalize(image)
  try:
    jax.block_until_ready(jax.jit(lambda: selection.kth_largest(x, y, ids, 0.5))())
    jax.block_until_ready(jax.jit(lambda: selection.kth_largest_of_rows(x[:256] @ y.T, 0.5))())
    jax.effects_barrier()
  finally:
    selection.lax.while_loop, selection.lax.fori_loop = plain
  return {scope: trips for scope, trips in seen.items() if scope in costs.MEASURED_TRIPS}


def _embeddings(n, width=128):
  """Embeddings as before training, after it, and with captions in groups of five."""
  random = np.random.default_rng(0)
  noise = lambda: random.standard_normal((n, width)).astype(np.float32)  # noqa: E731
  meaning, common = noise(), random.standard_normal(width).astype(np.float32)
  groups = np.repeat(meaning[: -(-n // 5)], 5, axis=0)[:n]
  return {
    "untrained": (noise() + 2 * common, noise() - 2 * common),
    "trained": (meaning + 0.8 * noise(), meaning + 0.8 * noise()),
    "in groups": (groups + 0.5 * noise(), groups + 0.5 * noise()),
  }


def table():
  """A Markdown table. The loss's share is its own bound / the step's bound."""
  print(
    "| batch | chips | loss | GiB/chip | ms/step ≥ | pairs/s ≤ | MFU ≤ | hours ≥ | loss's share |"
  )
  print("|" + "---|" * 9)
  for batch in (512, 32_768):
    for topology in ("v5e:2x4", "v5e:4x8", "v5e:16x16"):
      for loss in ("sampled_softmax", "cross_example_softmax", "cross_example_negative_mining"):
        plan = plans.make(_pod(loss, batch, chips.topology(topology).size), topology, say=_note)
        cells = [f"{batch:,}", topology, loss.replace("_", " "), f"{plan.used / 2**30:.1f}"]
        if plan.fits:
          share = plan.parts["loss"].bound / plan.times.bound
          cells += [f"{1e3 * plan.times.bound:.1f}", f"{plan.pairs_per_second:,.0f}"]
          cells += [f"{100 * plan.mfu:.0f} %", f"{plan.hours:.2f}", f"{100 * share:.2f} %"]
        print(f"| {' | '.join(cells)} |", flush=True)


def _pod(loss, batch, size):
  chosen = paper(size=224, tokens=32)
  with chosen.unlocked():
    chosen.text.positions = 512
  chosen.loss, chosen.batch_size = loss, batch
  if batch > 512:
    chosen.loss_implementation, chosen.dtype = "streaming", "bfloat16"
    chosen.micro_batch = 128 * size if 128 * size < batch else 0
  return chosen


def million():
  for loss in ("cross_example_softmax", "cross_example_negative_mining"):
    chosen = _pod(loss, 1_048_576, 1)
    chosen.micro_batch, chosen.dtype = 0, "float32"
    plan = plans.make(chosen, "v5e:16x16", only="loss", say=_note)
    print(
      f"million, {loss} alone: temporaries {plan.memory['temporaries'] / 2**30:.2f} GiB per chip "
      f"(target 2), at least {1e3 * plan.times.bound:.0f} ms"
    )


def _note(text):
  print(f"\r{text}", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
  main()
