"""The subprocess that compiles: python -m xe_retrieval.planning.compile, with a request on stdin.

The request is JSON: config, topology, only ("step" or "loss") and the output directory. Writes
traced.json before compiling, then answer.json and, if the step fits, program.txt.gz.
"""

import gzip
import json
import math
import os
import pathlib
import re
import sys
import threading
import time


def main():
  threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
  request = json.load(sys.stdin)
  out = pathlib.Path(request["out"])
  try:
    answer, text = compile_step(out, **{k: request[k] for k in ("config", "topology", "only")})
  except ValueError as e:
    answer, text = {"error": str(e)}, ""
  if text:
    with gzip.open(out / "program.txt.gz", "wt", compresslevel=5) as f:
      f.write(text)
  (out / "answer.json").write_text(json.dumps(answer))


def _exit_with_parent(parent):
  """Leaves no orphan that compiles for minutes when the parent is killed."""
  while os.getppid() == parent:
    time.sleep(1)
  os._exit(1)


def compile_step(out, config, topology, only):
  """-> memory and FLOPs by name, and the compiled program as HLO text."""
  import jax

  from xe_retrieval import config as config_lib
  from xe_retrieval.data import mesh as mesh_lib
  from xe_retrieval.training import loop

  devices = _devices(topology)
  config = config_lib.from_json(json.dumps(config))
  loop.validate(config, len(devices))
  mesh = mesh_lib.make(devices)
  began = time.perf_counter()
  lowered, answer = (_loss if only == "loss" else _step)(config, mesh)
  (out / "traced.json").write_text(json.dumps(answer))
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as e:
    if "memory" not in str(e) or "RESOURCE_EXHAUSTED" not in str(e):
      raise ValueError(f"the compiler failed: {str(e).splitlines()[0]}") from e
    return answer | {"fits": False} | _exhausted(str(e), answer), ""
  memory = compiled.memory_analysis()
  answer |= {
    "compiled_seconds": time.perf_counter() - began,
    "fits": True,
    "arguments": memory.argument_size_in_bytes,
    "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "program": memory.generated_code_size_in_bytes,
  }
  return answer, compiled.as_text()


def _devices(topology):
  kind, shape = topology.split(":")
  if kind == "cpu":
    import jax

    jax.config.update("jax_num_cpu_devices", max(int(shape), jax.config.jax_num_cpu_devices))
    return jax.devices()[: int(shape)]
  from jax.experimental import topologies

  # By default the two cores of a v4 chip are two devices; training uses them as one.
  options = {"chip_config_name": "megacore"} if kind == "v4" else {}
  return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


def _step(config, mesh):
  import jax

  from xe_retrieval.training import step, utilization

  built = step.build(config, mesh)
  state = built.state

  def shard_bytes(tree):  # on one chip
    return sum(
      int(x.dtype.itemsize) * math.prod(x.sharding.shard_shape(x.shape))
      for x in jax.tree.leaves(tree)
    )

  answer = {
    "parameters": shard_bytes((state.params, state.ema, state.batch_stats)),
    "optimiser": shard_bytes(state.opt_state),
    "batch": shard_bytes(built.batch),
    "model_flops": utilization.step_flops(built) / mesh.size,
  }
  return built.lower(), answer


def _loss(config, mesh):
  """The loss and its gradients without the towers, as the step calls it."""
  import jax
  import jax.numpy as jnp

  from xe_retrieval.data import mesh as mesh_lib
  from xe_retrieval.training import objective

  loss = objective.make_loss(config, mesh)
  n, rows = config.batch_size, mesh_lib.rows(mesh)
  embeddings = jax.ShapeDtypeStruct((n, config.embedding_dim), jnp.float32, sharding=rows)
  ids = jax.ShapeDtypeStruct((n,), jnp.int32, sharding=rows)

  @jax.named_scope("loss")
  def value(text, image, text_id, image_id):
    return loss(text, image, text_id=text_id, image_id=image_id)

  def loss_and_gradients(*arguments):
    return jax.value_and_grad(value, argnums=(0, 1))(*arguments)

  gradients = jax.jit(loss_and_gradients, out_shardings=(None, (rows, rows)))
  size = (2 * 4 * config.embedding_dim + 2 * 4) * n // mesh.size
  answer = {"parameters": 0, "optimiser": 0, "batch": size, "model_flops": 0.0}
  return gradients.lower(embeddings, embeddings, ids, ids), answer


def _exhausted(message, answer):
  """Parses the TPU compiler's two out-of-memory messages -> bytes used and usable."""
  amount = r"([\d.]+)([KMGT])"
  rest = 0  # not in the compiler's figure
  found = re.search(rf"Used {amount} of {amount} hbm", message)
  if not found:
    found = re.search(rf"temporaries \({amount}\) exceeds available HBM \({amount}\)", message)
    rest = sum(answer[name] for name in ("parameters", "optimiser", "batch"))
  if not found:
    return {"used": None}
  scale = {unit: 2 ** (10 * i) for i, unit in enumerate("KMGT", start=1)}
  used, usable = (float(found[i]) * scale[found[i + 1]] for i in (1, 3))
  return {"used": used + rest, "usable": usable}


if __name__ == "__main__":
  main()
