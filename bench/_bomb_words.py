"""Headers of the files that bombs are made of, and the bytes that they repeat."""

from __future__ import annotations

EVENT = b'{"ph":"X","cat":"kernel","name":"gemm","pid":0,"tid":7,"ts":%d,"dur":5},'
EVENTS = b'{"traceEvents":[' + EVENT % 1
_DUMP = b'{"pg_config":{},"entries":['
_INSPECTOR = b'{"coll_perf":'
_DFTRACER = (
    b'{"name":"read","cat":"POSIX","ph":"X","pid":1,"tid":1,"ts":1,"dur":5,"args":{"hhash":"a"}}\n'
)
_LOOP = (
    b'{"name":"TorchFramework.compute","cat":"ai_framework","ph":"X","pid":1,"tid":1,"ts":9,'
    b'"dur":5,"args":{"hhash":"a"}}\n'
)
_DYNOLOG = b'{"timestamp":"2026-01-01T00:00:00Z","cpu_u_ms":5,"x":'
_SCRAPE = b'DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="a"} 50\n'
_STEPS = b"rank,step,duration_s\n0,1,1.5\n"
_SMI = b"timestamp, index, utilization.gpu [%]\n2026/01/06 15:13:03.389, 0, 97 %\n"
_MLLOG = b':::MLLOG {"key":"epoch_start","time_ms":1700000000000,"value":null}\n'
_NCCL = b"node1:1:2 [0] NCCL INFO Using network Socket\n"
_ANSWER = b'{"data":{"resultType":"matrix","result":['
_SERIES = b'{"metric":{"__name__":"DCGM_FI_DEV_GPU_UTIL","gpu":"%d"},"values":[[1711034567,"97"]]},'
_SUMMARY = b'{"schema_version":"1.3","step_time":'
_PIPELINE = b'[{"name":"iteration begin","ph":"i","ts":1,"pid":0},'

DEEP_IN = (
    ("Kineto", "rank0.json", EVENTS),
    ("Kineto, before the events", "rank0.json", b'{"deviceProperties":'),
    ("Kineto, a list", "rank0.json", b"[" + EVENT % 1),
    ("flight recorder", "trace_rank_0.json", _DUMP),
    ("Prometheus", "answer.json", _ANSWER),
    ("TraceML", "final_summary.json", _SUMMARY),
    ("Dynolog", "dynolog.jsonl", _DYNOLOG + b"1}\n" + _DYNOLOG),
    ("DFTracer", "trace.pfw", _DFTRACER + b'{"name":"a","ph":"X","args":'),
    ("NCCL Inspector", "inspector.jsonl", _INSPECTOR),
    ("Megatron", "pp.json", _PIPELINE),
    ("step times", "steps.json", b'[{"rank":0,"step":1,"duration_s":1},'),
    ("rank series", "data_readiness.json", b'{"time":[1],"rank 0":['),
    ("DLIO", "0_output.json", b'{"1":{"load":{"block1":['),
)
NAMES_OF = (
    (
        "Kineto",
        "rank0.json",
        b'{"traceEvents":[',
        b'{"ph":"X","cat":"kernel","name":"k%d","pid":0,"tid":7,"ts":%d,"dur":5},',
        EVENT[:-1] % 1 + b"]}",
    ),
    ("Prometheus, series", "a.prom", b"", b'DCGM_FI_DEV_GPU_UTIL{gpu="%d",Hostname="a"} 50\n', b""),
    ("Prometheus, hosts", "a.prom", b"", b'DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="%d"} 50\n', b""),
    ("Prometheus, metrics", "a.prom", _SCRAPE, b"my_metric_%d 50\n", b""),
    ("Prometheus, answer", "answer.json", _ANSWER, _SERIES, _SERIES[:-1] % 1 + b"]}}"),
    ("DFTracer", "trace.pfw", _DFTRACER + _LOOP, _LOOP.replace(b"Framework", b"%d"), b""),
    (
        "DFTracer, processes",
        "trace.pfw",
        _DFTRACER + _LOOP,
        _LOOP.replace(b'"pid":1', b'"pid":%d'),
        b"",
    ),
    (
        "NCCL Inspector, communicators",
        "inspector.jsonl",
        b"",
        b'{"header":{"id":"%d","rank":0,"n_ranks":1},"metadata":{"dump_timestamp_us":9,"pid":1},'
        b'"coll_perf":{"coll":"AllReduce","coll_sn":1,"coll_msg_size_bytes":8,"coll_exec_time_us":5}}\n',
        b"",
    ),
    ("step times, jobs", "steps.csv", b"job,rank,step,duration_s\n", b"j%d,0,1,1.5\n", b""),
    (
        "GPU table, hosts",
        "gpus.csv",
        b"timestamp,Hostname,gpu,DCGM_FI_DEV_GPU_UTIL,DCGM_FI_DEV_GPU_TEMP\n",
        b"1700000000,h%d,0,50,50\n",
        b"",
    ),
    (
        "Dynolog, devices",
        "dynolog.jsonl",
        b"",
        b'{"timestamp":"2026-01-01T00:00:00Z","device":%d,"gpu_power_draw":5}\n',
        b"",
    ),
)
LINES = (
    ("DFTracer", "trace.pfw", _DFTRACER + _LOOP),
    ("Prometheus", "a.prom", _SCRAPE),
    ("step times", "steps.csv", _STEPS),
    ("nvidia-smi", "smi.csv", _SMI),
    ("MLPerf", "result_0.txt", _MLLOG),
    ("NCCL", "nccl.log", _NCCL),
    ("NCCL Inspector", "inspector.jsonl", _INSPECTOR + b"1}\n"),
    ("Dynolog", "dynolog.jsonl", _DYNOLOG + b"1}\n"),
    ("Kineto", "rank0.json", EVENTS),
)
PUMPED = (
    ("labels", "a.prom", _SCRAPE + b"DCGM_FI_DEV_GPU_UTIL{", b"a"),
    ("labels and spaces", "a.prom", _SCRAPE + b"DCGM_FI_DEV_GPU_UTIL{", b"a "),
    ("spaces first", "a.json", b"", b" "),
    ("NCCL, hosts", "nccl.log", _NCCL + b"NCCL INFO ", b"a"),
    ("NCCL, before", "nccl.log", _NCCL, b"a NCCL INFO "),
    ("NCCL, variables", "nccl.log", _NCCL + b"NCCL INFO ", b"NCCL_"),
    ("NCCL, channels", "nccl.log", _NCCL + b"NCCL INFO ", b"Channel 0 : 0 "),
    ("NCCL, networks", "nccl.log", _NCCL + b"NCCL INFO ", b"Using network a "),
    ("NCCL, digits", "nccl.log", _NCCL + b"# size ", b"1"),
    ("NCCL, rows", "nccl.log", _NCCL + b"# size ", b"1 1 float sum 1.1 "),
    ("Dynolog", "dynolog.log", b"", b"time = 2026-03-21T15:22:47.123Z data = {"),
    ("heads", "steps.csv", b"rank,step,duration,", b"_"),
    ("DFTracer, arguments", "trace.pfw", b'{"ph": 1,', b'"args":{'),
    ("nvidia-smi, heads", "smi.csv", _SMI, b"utilization.gpu [%], "),
    ("MLPerf", "result_0.txt", b":::MLLOG {", b":::MLLOG {"),
    ("Kineto, openings", "rank0.json", b'{"deviceProperties":"', b'\\"traceEvents":['),
    ("Kineto, beginnings", "rank0.json", b'{"a":[', b'{"traceEvents":[[],'),
    (
        "Kineto, a group of spaces",
        "rank0.json",
        EVENTS + b'{"ph":"X","cat":"kernel","name":"ncclA","pid":0,"tid":7,"ts":1,"dur":5,'
        b'"args":{"Collective name":"allreduce","Process Group Name":"0","Process Group Ranks":"1',
        b" ",
    ),
    (
        "Kineto, a long name",
        "rank0.json",
        EVENTS + b'{"ph":"X","cat":"cpu_op","pid":0,"tid":7,"ts":1,"dur":5,"name":"',
        b"torch/_dynamo/convert_frame.py",
    ),
)
VALUES = (
    ("flight recorder", "trace_rank_0.json", _DUMP, b"[],"),
    ("TraceML", "final_summary.json", _SUMMARY + b"[", b"[],"),
    ("Megatron", "pp.json", _PIPELINE, b"{},"),
    ("rank series", "data_readiness.json", b'{"time":[1],"rank 0":[', b"[],"),
    ("DLIO", "0_output.json", b'{"1":{"load":{"block1":[', b"[],"),
    ("Prometheus", "answer.json", _ANSWER + b'{"metric":{"__name__":"x"},"values":[', b"[],"),
    ("Kineto, beside the events", "rank0.json", b'{"deviceProperties":[', b"[],"),
    ("step times", "steps.json", b'[{"rank":0,"step":1,"duration_s":1},', b"[[]],"),
)
