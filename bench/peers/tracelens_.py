"""TraceLens on one trace: its GPU timeline, as one line of JSON."""

from __future__ import annotations

import json
import sys


def main(path: str) -> None:
    from TraceLens import TreePerfAnalyzer

    analyzer = TreePerfAnalyzer.from_file(path)
    table = analyzer.get_df_gpu_timeline().set_index("type")["time ms"]
    print(
        json.dumps(
            {
                "version": "",
                "window_ms": float(table["total_time"]),
                "idle_ms": float(table["idle_time"]),
                "compute_ms": float(table["computation_time"]),
                "exposed_comm_ms": float(table["exposed_comm_time"]),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
