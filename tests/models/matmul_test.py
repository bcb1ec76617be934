"""The gradient of a weight in bf16: sums of products of rounded operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metagym.models.matmul import dot, matmul, outer


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((128, 48), (128, 64)))


def rounded(x):
    return np.asarray(x.astype(jnp.bfloat16), np.float64)


def test_products_are_of_rounded_operands_and_sums_are_f32(operands):
    x, y = operands
    got = jax.jit(lambda x, y: outer(x, y, jnp.dtype(jnp.bfloat16)))(x, y)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, rounded(x).T @ rounded(y), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_weight_is_this_product(operands):
    x, dy = operands
    w = jnp.zeros((48, 64))
    dw = jax.grad(lambda w: (matmul(x, w, jnp.bfloat16) * dy).sum())(w)
    np.testing.assert_allclose(dw, rounded(x).T @ rounded(dy), rtol=1e-5, atol=1e-5)


def test_in_f32_it_is_the_plain_product(operands):
    x, y = operands
    assert jnp.array_equal(outer(x, y, jnp.dtype(jnp.float32)), dot(x, y, (0, 0), jnp.dtype(jnp.float32)))


@pytest.mark.parametrize(("platform", "transposed"), [("cpu", True), ("tpu", False)])
def test_the_platform_that_is_compiled_for_decides(operands, platform, transposed):
    traced = jax.jit(lambda x, y: outer(x, y, jnp.dtype(jnp.bfloat16))).trace(*operands)
    assert ("LayoutConstraint" in traced.lower(lowering_platforms=(platform,)).as_text()) == transposed


def test_on_a_mesh_it_is_the_plain_product(operands):
    with jax.set_mesh(jax.make_mesh((2,), ("fsdp",))):
        text = jax.jit(lambda x, y: outer(x, y, jnp.dtype(jnp.bfloat16))).lower(*operands).as_text()
    assert "LayoutConstraint" not in text
