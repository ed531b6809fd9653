"""What the engine, the clocks and the agent do on a real GPU: `python -m benchmarks.gpu`.

`sections` lists what is measured. Each section is a function of a device and a scale in one of the
other modules, runs in a process of its own (`runner`), and returns a dataclass of figures; `page`
writes them. On a CPU (`--device cpu`) the same functions run in small, for tests: no figure of
theirs says anything of a GPU. Settings of devices are never touched.
"""
