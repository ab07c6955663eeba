"""Costs of compiled programs against counts by hand, on eight CPU devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from xe_retrieval import losses
from xe_retrieval.data import mesh as mesh_lib
from xe_retrieval.planning import costs, hlo
from xe_retrieval.towers.convolution import convolve


def _compiled(function, *shapes, **options):
  shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
  return jax.jit(function, **options).lower(*shapes).compile().as_text()


def test_shapes_are_padded_to_tiles_and_have_a_memory_space():
  one, two = hlo.shapes("(f32[10,100]{1,0:T(8,128)}, bf16[3,5,200]{0,2,1:T(8,128)(2,1)S(1)})")
  assert (one.bytes, one.space) == (16 * 128 * 4, 0)
  assert (two.bytes, two.space) == (128 * 5 * 200 * 2, 1)  # axis 0 is the minor one, then axis 2
  assert hlo.shapes("pred[]")[0].bytes == 1


def test_products():
  text = _compiled(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (3, 16, 32), (3, 32, 64))
  total = costs.count(text).total
  assert total.flops == total.passes == 2 * 3 * 16 * 32 * 64
  assert total.bytes >= 4 * 3 * (16 * 32 + 32 * 64 + 16 * 64)


def test_a_product_at_full_precision_takes_six_passes():
  text = _compiled(lambda x, y: jnp.matmul(x, y, precision="highest"), (16, 32), (32, 64))
  total = costs.count(text).total
  assert total.passes == 6 * total.flops == 6 * 2 * 16 * 32 * 64


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_and_their_gradients(stride):
  # A third of a 3x3 window at the edge is padding: over 8 positions, 22 of 24 are inside.
  forward = lambda x, k: convolve(x, k, stride)  # noqa: E731
  inside = 22 if stride == 1 else 11
  text = _compiled(forward, (2, 8, 8, 4), (3, 3, 4, 5))
  assert costs.count(text).total.flops == 2 * 2 * 4 * 5 * inside**2
  default = lambda x, k: jax.lax.conv_general_dilated(  # noqa: E731
    x, k, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
  )
  both = jax.grad(lambda x, k: jnp.sum(default(x, k) ** 2), argnums=(0, 1))
  text = _compiled(both, (2, 8, 8, 4), (3, 3, 4, 5))
  assert costs.count(text).total.flops == 3 * 2 * 2 * 4 * 5 * inside**2


def test_loop_bodies_are_multiplied_by_the_trip_count():
  def function(x, y):
    return jax.lax.scan(lambda c, row: (jnp.tanh(c @ y + row), None), x[0], x)[0]

  assert costs.count(_compiled(function, (7, 16, 16), (16, 16))).total.flops == 7 * 2 * 16**3


def test_unknown_trip_counts_are_assumed_or_reported():
  def function(x):
    with jax.named_scope("passes"):
      x = jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x @ x, x)
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 2, lambda x: x @ x, x)

  counted = costs.count(_compiled(function, (16, 16)))
  assert counted.assumed == {"passes": costs.MEASURED_TRIPS["passes"]}
  assert counted.unknown == 1
  assert counted.total.flops == (1 + costs.MEASURED_TRIPS["passes"]) * 2 * 16**3


def test_collectives():
  mesh = mesh_lib.make()

  @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")))
  def function(x):  # [2, 4] on each device
    every = jax.lax.all_gather(x, "data", tiled=True)  # [16, 4]
    return jax.lax.psum(jnp.sum(x * 2, axis=0), "data"), jax.lax.psum_scatter(
      jnp.sin(every), "data", tiled=True
    )

  total = costs.count(_compiled(function, (16, 4))).total
  assert total.collectives == {
    ("all-gather", 16 * 4 * 4, 8): 1,
    ("all-reduce", 4 * 4, 8): 1,
    ("reduce-scatter", 16 * 4 * 4, 8): 1,
  }
  assert total.calls == {"all-gather": 1, "all-reduce": 1, "reduce-scatter": 1}


def test_the_loss_is_six_n_squared_d_over_the_devices():
  mesh, n, d = mesh_lib.make(), 2048, 16
  loss = losses.get("cross_example_softmax", implementation="streaming", mesh=mesh)
  rows = jax.ShapeDtypeStruct((n, d), jnp.float32, sharding=mesh_lib.rows(mesh))
  text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(rows, rows).compile().as_text()
  total = costs.count(text).total
  assert total.flops == 6 * n * n * d / 8
  assert total.passes == 6 * total.flops
  assert total.collectives["all-gather", n * d * 4, 8] == 1


@pytest.mark.parametrize(
  "scope, part",
  [
    (
      "jit(train_step)/jvp(DualEncoder)/DualEncoder.embed_text/text/tower/layer_3/dot",
      "text tower",
    ),
    (
      "jit(train_step)/transpose(jvp(DualEncoder))/DualEncoder.embed_image/image/mul",
      "image tower",
    ),
    ("jit(train_step)/transpose(jvp(loss))/jit(run)/shard_map/while", "loss"),
    ("jit(train_step)/optimizer/mul", "optimiser"),
    ("jit(train_step)/reduce_sum", "other"),
    ("", None),
  ],
)
def test_parts(scope, part):
  assert costs.part(scope) == part


TPU_LOOP = """
%body.1 (p.1: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %x.1 = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%p.1), index=1
  %y.1 = f32[8,128]{1,0:T(8,128)} negate(%x.1), backend_config={"estimated_cycles":"10"}
  %z.1 = f32[8,128]{1,0:T(8,128)S(1)} copy(%y.1)
  ROOT %t.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) tuple(%i.1, %z.1)
}

%condition.1 (p.2: (s32[], f32[8,128])) -> pred[] {
  %p.2 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %end.1 = s32[]{:T(128)} constant(4)
  ROOT %lt.1 = pred[]{:T(512)} compare(%i.2, %end.1), direction=LT
}

%sliced.1 (p.3: f32[8,128]) -> f32[8,64] {
  %p.3 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %slice.1 = f32[8,64]{1,0:T(8,128)S(1)} slice(%p.3), slice={[0:8], [0:64]}
}

ENTRY %main.1 (x.2: f32[8,128]) -> f32[8,128] {
  %x.2 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %start.1 = s32[]{:T(128)} constant(1)
  %copied.1 = s32[]{:T(128)} copy(%start.1)
  %fast.1 = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x.2)
  %fast.2 = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%fast.1)
  %t.2 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) tuple(%copied.1, %fast.2)
  %w.1 = (s32[], f32[8,128]{1,0:T(8,128)S(1)}) while(%t.2), condition=%condition.1, body=%body.1
  %y.2 = f32[8,128]{1,0:T(8,128)S(1)} get-tuple-element(%w.1), index=1
  %s.1 = ((f32[8,128]{1,0:T(8,128)}), f32[8,64]{1,0:T(8,128)S(1)}, s32[]) slice-start(%x.2)
  %s.2 = f32[8,64]{1,0:T(8,128)S(1)} slice-done(%s.1)
  %s.3 = ((f32[8,128]), f32[8,64]{1,0:T(8,128)S(1)}, s32[]) async-start(%x.2), calls=%sliced.1
  %s.4 = f32[8,64]{1,0:T(8,128)S(1)} async-done(%s.3)
  ROOT %out.1 = (f32[8,128], f32[8,64], f32[8,64]) tuple(%y.2, %s.2, %s.4)
}
"""


def test_a_loop_as_the_tpu_compiler_prints_it():
  total = costs.count(TPU_LOOP).total
  assert total.cycles == 3 * 10  # from 1 to 4
  # Copied once from HBM; in each trip written to HBM and read again; two slices, padded to a tile.
  assert total.bytes == (1 + 3 * 2 + 2) * 8 * 128 * 4


TPU_CHAIN = """
%beside.1 (p.1: f32[4,128], p.2: f32[8,128], p.3: f32[128,128]) -> (f32[8,128], f32[8,128]) {
  %p.1 = f32[4,128]{1,0:T(8,128)} parameter(0)
  %p.2 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %p.3 = f32[128,128]{1,0:T(8,128)} parameter(2)
  %g.1 = f32[8,128]{1,0} all-gather(%p.1), replica_groups={{0,1}}, X={chain_id="0"}
  %c.1 = f32[8,128]{1,0:T(8,128)} convolution(%p.2, %p.3), dim_labels=bf_io->bf
  ROOT %t.1 = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) tuple(%c.1, %g.1)
}

ENTRY %main.1 (x.1: f32[4,128], x.2: f32[8,128], x.3: f32[128,128]) -> f32[8,128] {
  %x.1 = f32[4,128]{1,0:T(8,128)} parameter(0)
  %x.2 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %x.3 = f32[128,128]{1,0:T(8,128)} parameter(2)
  %f.1 = (f32[8,128], f32[8,128]) fusion(%x.1, %x.2, %x.3), kind=kCustom, calls=%beside.1
  %f.2 = (f32[8,128], f32[8,128]) fusion(%x.1, %x.2, %x.3), kind=kCustom, calls=%beside.1
  ROOT %out.1 = f32[8,128]{1,0:T(8,128)} get-tuple-element(%f.2), index=0
}
"""


def test_an_asynchronous_collective_in_two_fusions_counts_once():
  total = costs.count(TPU_CHAIN).total
  assert total.flops == 2 * 2 * 8 * 128 * 128  # in both fusions
  assert total.calls == {"all-gather": 1}
  products = 2 * (8 * 128 + 128 * 128 + 8 * 128) * 4
  assert total.bytes == products + (8 + 4) * 128 * 4  # all-gather: half is read, all is written
