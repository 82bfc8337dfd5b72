"""JAX: its compilations, as it tells those who listen."""

from __future__ import annotations

from pathlib import Path

from tests.support.frameworks import (
    COMPILE,
    list_hooked_modules,
    require_modules,
    run_with_and_without_probe,
)

require_modules("jax")

CODE = """
import jax, jax.numpy as jnp
import clusterprof

@jax.jit
def loss(x):
    for _ in range(20):
        x = jnp.sin(x) @ x.T @ x
    return x.sum()

ready = [jnp.ones((n, n)).block_until_ready() for n in (3, 5)]
for name, x in (("new", ready[0]), ("same", ready[0]), ("shape", ready[1])):
    with clusterprof.span(name):
        print(loss(x))
"""


def test_jax_compilations_are_recorded_for_each_new_shape(tmp_path: Path) -> None:
    (ring,) = run_with_and_without_probe(CODE, tmp_path)
    assert "jax._src.monitoring" in list_hooked_modules(ring)
    kinds = {name: kind for kind, name in ring.names.items()}
    collected = {}
    for name in ("new", "same", "shape"):
        (span,) = ring.of(kinds[name])
        compiled = [
            item for item in ring.of(COMPILE) if span.start_ns <= item.end_ns <= span.end_ns
        ]
        assert all(span.a == -1 and span.start_ns < span.end_ns for span in compiled)
        collected[name] = len(compiled)
        if compiled:  # most of the first call is the compiler's
            spent = sum(span.end_ns - span.start_ns for span in compiled)
            assert spent * 2 > span.end_ns - span.start_ns
    # Traced, lowered and compiled for each shape; the second call has it all.
    assert collected["same"] == 0
    assert collected["new"] >= 3 and collected["shape"] >= 3
