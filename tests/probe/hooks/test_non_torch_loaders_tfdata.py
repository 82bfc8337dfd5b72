"""tf.data: waits for the batches of a dataset that the job iterates over itself."""

from __future__ import annotations

from pathlib import Path

from tests.support.frameworks import (
    list_hooked_modules,
    require_modules,
    run_with_and_without_probe,
)
from tests.support.probe_jobs import DATA_WAIT

require_modules("tensorflow")

CODE = """
import time
import tensorflow as tf

def slow(x):
    time.sleep(0.02)
    return x

dataset = tf.data.Dataset.range(8).map(lambda x: tf.py_function(slow, [x], tf.int64)).batch(2)
print([batch.numpy().tolist() for batch in dataset])
print([batch.tolist() for batch in dataset.as_numpy_iterator()])
"""


def test_a_tf_data_dataset_records_data_waits(tmp_path: Path) -> None:
    (ring,) = run_with_and_without_probe(
        CODE, tmp_path, TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES=""
    )
    assert "tensorflow.python.data.ops.iterator_ops" in list_hooked_modules(ring)
    waits = ring.of(DATA_WAIT)
    assert [(wait.a, wait.b, wait.c, wait.d) for wait in waits] == 8 * [(-1, -1, -1, -1)]
    # Two rows of 20 ms each, and nothing is made ahead.
    assert all(wait.end_ns - wait.start_ns > 39_000_000 for wait in waits)
