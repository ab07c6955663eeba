"""The losses against plain JAX, lax.top_k and open_clip: time, memory, compilation.

  python -m benchmarks.losses [--out=losses.json] [--only=compile,top_k]

Everything is forward + backward on random pairs, D = 128, float32. Each measurement runs in its own
process; competitors alternate and the best round of each counts, so that a busy machine affects
both alike. open_clip's losses need `pip install torch open_clip_torch`, else they are left out.
"""

import argparse
import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
import time

import numpy as np

DIM = 128


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--out", default="losses.json", help="where the figures go")
  parser.add_argument("--only", default="", help=f"some of: {','.join(SECTIONS)}")
  parser.add_argument("--job", help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.job:
    print(json.dumps(measure(**json.loads(arguments.job))))
    return
  figures = []
  for name, section in SECTIONS.items():
    if not arguments.only or name in arguments.only.split(","):
      for row in section():
        print("{what:62} {value:>9.2f} {unit:4} {target}".format(**row), flush=True)
        figures.append(row)
  pathlib.Path(arguments.out).write_text(json.dumps(figures, indent=2) + "\n")


def against_dense(n=16_384):
  """Cross-example softmax against the obvious implementation in JAX."""
  ours, plain = rounds(
    [job("cross_example_softmax", n), job("cross_example_softmax", n, "naive")], 3
  )
  yield row(f"cross-example softmax, N={n:,}", ours["seconds"], "s")
  yield row("  time / plain JAX", ours["seconds"] / plain["seconds"], "×", "≤ 1.0")
  yield row("  temporaries", ours["temporaries"], "MiB", "≤ 80")
  yield row("  temporaries / plain JAX", ours["temporaries"] / plain["temporaries"], "×")
  double = run(job("cross_example_softmax", 2 * n, steps=0))
  yield row("  temporaries at 2N / at N", double["temporaries"] / ours["temporaries"], "×", "≤ 2.1")


def corrected(n=16_384):
  """Corrected cross-example softmax, which takes one more product, against the plain one."""
  names = ("corrected_cross_example_softmax", "cross_example_softmax")
  ours, plain = rounds([job(name, n) for name in names], 3)
  yield row(f"corrected cross-example softmax, N={n:,}", ours["seconds"], "s")
  yield row("  time / cross-example softmax", ours["seconds"] / plain["seconds"], "×", "≤ 2")
  temporaries = ours["temporaries"] / plain["temporaries"]
  yield row("  temporaries / cross-example softmax", temporaries, "×", "≤ 1.3")


def against_top_k(n=4_096):
  """Negative mining against lax.top_k."""
  name = "cross_example_negative_mining"
  mining, softmax = rounds([job(name, n), job("cross_example_softmax", n)], 3)
  top_k = run(job(name, n, "top_k", steps=1))
  yield row(f"cross-example negative mining, N={n:,}", mining["seconds"], "s")
  yield row("  lax.top_k / ours, time", top_k["seconds"] / mining["seconds"], "×", "≥ 15")
  yield row("  ours / cross-example softmax", mining["seconds"] / softmax["seconds"], "×", "≤ 2.5")


def large(n=65_536):
  """More pairs than an int32 can count."""
  figures = run(job("cross_example_negative_mining", n, steps=1))
  yield row(f"cross-example negative mining, N={n:,}", figures["seconds"], "s")
  yield row("  temporaries", figures["temporaries"], "MiB", "< 1024")
  yield row("  growth of the process's peak memory", figures["peak"], "MiB", "< 1024")


def against_open_clip(*sizes):
  """open_clip's losses in PyTorch; their values must equal ours."""
  if not importlib.util.find_spec("torch") or not importlib.util.find_spec("open_clip"):
    print("open_clip: left out because torch or open_clip_torch is not installed")
    return
  for n in sizes:
    for name, theirs in (("symmetric", "ClipLoss"), ("sigmoid", "SigLipLoss")):
      count = 3 if n < 10_000 else 2
      ours, other = rounds([job(name, n), job(theirs, n, "open_clip")], count)
      assert abs(ours["value"] / other["value"] - 1) < 1e-4, (ours["value"], other["value"])
      yield row(f"{name}, N={n:,}", ours["seconds"], "s")
      yield row(f"  {theirs} / ours, time", other["seconds"] / ours["seconds"], "×", "> 1")
      yield row(f"  {theirs} / ours, peak memory", other["peak"] / ours["peak"], "×", "> 1")


def over_devices(devices=8):
  """Memory of a device when the batch is sharded: its strips and the gathered columns."""
  for n in (65_536, 262_144):
    figures = run(job("cross_example_softmax", n, steps=0, devices=devices))
    yield row(f"N={n:,} over {devices} devices, temporaries of each", figures["temporaries"], "MiB")
    gathered = 2 * 4 * n * DIM / 2**20  # columns and their gradients
    yield row("  of these, what a ring would save", gathered * (1 - 1 / devices), "MiB")


def compilation(n=4_096, others=(1_000, 65_536)):
  """Every loss: time of a step, longest compilation of three sizes, number of compilations."""
  from xe_retrieval import losses

  for name in losses.names():
    figures = run(job(name, n))
    times = [run(job(name, other, steps=0))["compilation"] for other in others]
    yield row(f"{name}, N={n:,}", figures["seconds"], "s")
    yield row("  compilation at any N", max(figures["compilation"], *times), "s", "≤ 10")
    yield row("  compilations in all", figures["compilations"], "", "= 1")


SECTIONS = {
  "dense": against_dense,
  "corrected": corrected,
  "corrected_small": functools.partial(corrected, 4_096),
  "top_k": against_top_k,
  "large": large,
  "open_clip": functools.partial(against_open_clip, 4_096),
  "open_clip_large": functools.partial(against_open_clip, 16_384),
  "devices": over_devices,
  "compile": compilation,
}


def row(what, value, unit, target=""):
  return dict(what=what, value=value, unit=unit, target=target and f"(target {target})")


def job(name, n, implementation="streaming", steps=3, devices=0):
  return dict(name=name, n=n, implementation=implementation, steps=steps, devices=devices)


def rounds(jobs, count):
  """Runs the jobs alternately, `count` times; best time and largest memory of each."""
  results = [[run(job) for job in jobs] for _ in range(count)]
  return [
    {**some[0], "seconds": min(r["seconds"] for r in some), "peak": max(r["peak"] for r in some)}
    for some in zip(*results, strict=True)
  ]


def run(job):
  """Measures in a new process."""
  command = [sys.executable, "-m", "benchmarks.losses", "--job", json.dumps(job)]
  return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def measure(name, n, implementation, steps, devices):
  random = np.random.default_rng(0)
  text = random.normal(size=(n, DIM)).astype(np.float32)
  image = (text + 2 * random.normal(size=(n, DIM))).astype(np.float32)
  if implementation == "open_clip":
    return measure_torch(name, text, image, steps)
  return measure_jax(name, text, image, implementation, steps, devices)


def measure_jax(name, text, image, implementation, steps, devices):
  import jax

  from xe_retrieval import losses

  rows, loss = None, PLAIN.get(implementation)
  if devices:
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,))
    loss = losses.get(name, implementation=implementation, mesh=mesh)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  loss = loss or losses.get(name, implementation=implementation)
  text, image = jax.device_put((text, image), rows)
  traces = []

  def traced(text, image):
    traces.append(1)
    return loss(text, image)

  step = jax.jit(jax.value_and_grad(traced, (0, 1)))
  start = time.perf_counter()
  compiled = step.lower(text, image).compile()
  figures = dict(compilation=time.perf_counter() - start)
  figures["temporaries"] = compiled.memory_analysis().temp_size_in_bytes / 2**20
  run = compiled if steps == 1 else step
  figures |= timed(lambda: jax.block_until_ready(run(text, image)), steps)
  return {**figures, "compilations": len(traces)}


def measure_torch(name, text, image, steps):
  import torch

  location = importlib.util.find_spec("open_clip").submodule_search_locations[0]
  # Only this module: importing the package would need torchvision.
  spec = importlib.util.spec_from_file_location("open_clip_loss", f"{location}/loss.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  loss = getattr(module, name)()
  scale, bias = torch.tensor(20.0), torch.tensor(-10.0)
  text, image = torch.from_numpy(text), torch.from_numpy(image)

  def step():
    x, y = text.clone().requires_grad_(), image.clone().requires_grad_()
    normalized = [torch.nn.functional.normalize(z) for z in (y, x)]
    value = loss(*normalized, scale, bias) if name == "SigLipLoss" else loss(*normalized, scale)
    value.backward()
    return value.item(), (x.grad, y.grad)

  return timed(step, steps)


def timed(step, steps):
  """Best time of at least `steps` steps and one second, and the growth of peak memory.

  The first step is not counted unless it is the only one.
  """
  if not steps:
    return dict(seconds=0.0, peak=0.0, value=0.0)
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
  before = memory("VmRSS")
  times = []
  while len(times) < steps + (steps > 1) or sum(times) < 1:
    start = time.perf_counter()
    value = float(step()[0])
    times.append(time.perf_counter() - start)
  return dict(seconds=min(times[steps > 1 :]), peak=memory("VmHWM") - before, value=value)


def memory(field):  # MiB
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(field):
      return int(line.split()[1]) / 1024


def naive_cross_example_softmax(text, image):
  import jax
  import jax.numpy as jnp

  text = text / jnp.linalg.norm(text, axis=1, keepdims=True)
  image = image / jnp.linalg.norm(image, axis=1, keepdims=True)
  scores = 20.0 * text @ image.T
  negatives = jax.nn.logsumexp(scores, where=~jnp.eye(len(scores), dtype=bool))
  return jnp.mean(jnp.logaddexp(0, negatives - jnp.diag(scores)))


def top_k_negative_mining(text, image):
  import jax
  import jax.numpy as jnp

  text = text / jnp.linalg.norm(text, axis=1, keepdims=True)
  image = image / jnp.linalg.norm(image, axis=1, keepdims=True)
  scores = 20.0 * text @ image.T
  n = len(scores)
  negatives = jnp.where(jnp.eye(n, dtype=bool), -jnp.inf, scores).ravel()
  hardest = jax.lax.top_k(negatives, n * (n - 1) // 2)[0]
  return jnp.mean(jnp.logaddexp(0, jax.nn.logsumexp(hardest) - jnp.diag(scores)))


PLAIN = {"naive": naive_cross_example_softmax, "top_k": top_k_negative_mining}


if __name__ == "__main__":
  main()
