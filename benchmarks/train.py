"""Cost of training beyond the towers: loss, loop, checkpoints; and a large batch in 8 GiB.

  python -m benchmarks.train [--only=step,loop,checkpoint]
  python -m benchmarks.train --only=memory        # one step of the paper's batch: takes minutes

step        the train step against the towers' forward, backward and optimiser alone, N=512:
            BERT-base and ResNet-50 with 8 tokens and 32x32 pixels, half a minute on two cores. At
            full size the towers cost many times as much, the loss the same.
loop        overhead of the loop over the step itself, and number of compilations.
checkpoint  how long an asynchronous save blocks the loop, against a synchronous one; the paper's
            towers.
memory      peak resident memory of one step in micro-batches: batch 512, the paper's towers at full
            size.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import cc, quickstart
from xe_retrieval import config as config_lib
from xe_retrieval import main as training
from xe_retrieval.data import mesh
from xe_retrieval.towers import dual_encoder
from xe_retrieval.training import step
from xe_retrieval.training.checkpoints import Checkpoints


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--only", default="step,loop,checkpoint")
  parser.add_argument("--repetitions", type=int, default=5)
  parser.add_argument("--micro_batch", type=int, default=8, help="of --only=memory")
  args = parser.parse_args()
  parts = {
    "step": lambda: full_step(args.repetitions),
    "loop": loop,
    "checkpoint": lambda: checkpoint(args.repetitions),
    "memory": lambda: memory(args.micro_batch),
  }
  for name in args.only.split(","):
    parts[name]()


def paper(size, tokens):
  """The paper's recipe without pretrained weights."""
  config = cc.get_config("cross_example_negative_mining")
  config.text.pretrained = config.image.pretrained = ""
  config.image.size, config.text.tokens = size, tokens
  return config


def start(config):
  built = step.build(config, mesh.make(jax.devices()[:1]))
  variables = jax.device_get(dual_encoder.init(config, built.model))
  return built, step.init(config, variables, built.optimizer, mesh.make(jax.devices()[:1]))


def random_batch(config):
  random = np.random.default_rng(0)
  n, size = config.batch_size, config.image.size
  out = {
    "tokens": random.integers(1, config.text.vocab_size, (n, config.text.tokens), dtype=np.int32),
    "image": random.integers(0, 256, (n, size, size, 3), np.uint8),
    "text_id": np.arange(n, dtype=np.int32),
    "image_id": np.arange(n, dtype=np.int32),
  }
  return jax.device_put(out)


def full_step(repetitions):
  config = paper(size=32, tokens=8)
  built, state = start(config)
  batch = random_batch(config)

  def bare(state, batch):
    def total(params):
      (text, image), updated = built.model.apply(
        {"params": params, "batch_stats": state.batch_stats},
        batch["tokens"],
        batch["image"],
        train=True,
        rngs={"dropout": jax.random.fold_in(state.rng, state.step)},
        mutable=["batch_stats"],
      )
      return jnp.sum(text**2) + jnp.sum(image**2), updated["batch_stats"]

    grads, batch_stats = jax.grad(total, has_aux=True)(state.params)
    updates, opt_state = built.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state.replace(
      step=state.step + 1, params=params, batch_stats=batch_stats, opt_state=opt_state
    ), {}

  bare = jax.jit(bare, donate_argnums=0)
  states, times = [state, jax.tree.map(jnp.copy, state)], [[], []]
  for repetition in range(repetitions + 1):
    for i, function in enumerate((built.train_step, bare)):
      began = time.perf_counter()
      states[i], _ = jax.block_until_ready(function(states[i], batch))
      if repetition:
        times[i].append(time.perf_counter() - began)
  ratio = np.median(np.array(times[0]) / np.array(times[1]))
  full, towers = (1e3 * min(t) for t in times)
  print(f"step: full {full:,.0f} ms, towers alone {towers:,.0f} ms", end="; ")
  print(f"ratio {full / towers:.3f} of the fastest, {ratio:.3f} in the median (target 1.05)")


def loop():
  """With cached features of frozen towers, so that the step itself takes little time."""
  config = quickstart.get_config()
  config.steps, config.batch_size, config.log_every = 600, 128, 100
  config.eval_every = config.checkpoint_every = 10_000
  config.data.name, config.text.freeze, config.image.freeze = "shapes/1024", "all", "all"
  with tempfile.TemporaryDirectory() as root:
    config.data.dir, workdir = f"{root}/data", pathlib.Path(root) / "run"
    training.train(config, workdir, jax.devices()[:1])
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    lines = [line for line in lines if "pairs_per_second" in line][1:-1]
    config = config_lib.from_json((workdir / "config.json").read_text())
    few, many = (_programs(config, f"{root}/{steps}", steps) for steps in (2, 40))
  per_step = np.median([128e3 / line["pairs_per_second"] for line in lines])
  waiting = np.median([line["data_wait_ms"] for line in lines])
  built, state = start(config)
  batch = {k: jax.device_put(np.zeros(x.shape, x.dtype)) for k, x in built.batch.items()}
  times = []
  for _ in range(600):
    began = time.perf_counter()
    state, _ = jax.block_until_ready(built.train_step(state, batch))
    times.append(1e3 * (time.perf_counter() - began))
  alone = np.median(times)
  print(f"loop: {per_step:.2f} ms per step, of it {waiting:.2f} making the batch", end=", ")
  print(f"{alone:.2f} the step itself; own overhead {per_step - waiting - alone:.2f} ms (target 2)")
  print(f"loop: {many - few} programs compiled after step 2 (target 0)")


def _programs(config, workdir, steps):
  """Number of programs that a run of `steps` compiles, with a log line at each step."""
  seen = []
  listen = lambda event, *_, **__: seen.append(event) if "backend_compile" in event else None  # noqa: E731
  jax.monitoring.register_event_duration_secs_listener(listen)
  config.steps, config.log_every = steps, 1
  config.text.warmup_steps = config.image.warmup_steps = 1
  training.train(config, workdir, jax.devices()[:1])
  jax.monitoring.clear_event_listeners()
  return len(seen)


def checkpoint(repetitions):
  _, state = start(paper(size=224, tokens=32))
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  blocked, finished = [], []
  with tempfile.TemporaryDirectory() as root:
    saved = Checkpoints(root, keep=1)
    for n in range(1, repetitions + 2):
      state = state.replace(step=state.step + 1)
      began = time.perf_counter()
      saved.save(state, None, "{}")
      if n > 1:  # the first compiles
        blocked.append(time.perf_counter() - began)
      saved._settle()
      if n > 1:
        finished.append(time.perf_counter() - began)
    saved.close()
  print(
    f"checkpoint of {size / 2**30:.2f} GiB: blocks the loop for {min(blocked):.2f} s, done after "
    f"{min(finished):.2f} s; ratio {np.median(blocked) / np.median(finished):.3f} (target 0.10)"
  )


def memory(micro_batch):
  """In a subprocess, so that its peak is that of the step."""
  if "XE_MEMORY" not in os.environ:
    command = [sys.executable, "-m", "benchmarks.train", "--only=memory"]
    command.append(f"--micro_batch={micro_batch}")
    subprocess.run(command, check=True, env=dict(os.environ, XE_MEMORY="1"))
    return
  config = paper(size=224, tokens=32)
  config.micro_batch = micro_batch
  built, state = start(config)
  began = time.perf_counter()
  state, metrics = jax.block_until_ready(built.train_step(state, random_batch(config)))
  seconds = time.perf_counter() - began
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  print(
    f"memory: batch {config.batch_size} of BERT-base and ResNet-50 in micro-batches of "
    f"{micro_batch}: loss {float(metrics['loss']):.3f}, {seconds:.0f} s with compilation, peak "
    f"{peak:.2f} GiB (target 8)"
  )


if __name__ == "__main__":
  main()
