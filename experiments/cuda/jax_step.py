"""Fifty steps of gradient descent in JAX; the sum of the weights. The allocator is the environment's choice."""

import jax
from jax import numpy as jnp

key = jax.random.PRNGKey(0)
weights = jax.random.normal(key, (1024, 1024)) * 0.02
rows = jax.random.normal(key, (256, 1024))
gradient = jax.jit(jax.grad(lambda weights: jnp.mean(jnp.tanh(rows @ weights) ** 2)))
for _ in range(50):
    weights = weights - 0.1 * gradient(weights)
print(f"jax {jax.default_backend()} {float(jnp.abs(weights).sum()):.2f}")
