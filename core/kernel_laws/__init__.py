"""Time of kernels on a GPU, fitted to measured ones, and the noise of such times.

In: kernels by shape (`kernels`), a device's table (`h100`). Out: seconds, by `laws.time_s`; times
that repeat with drift, tails and hiccups, by `noise`. The emulated device of the trainer takes its
times here, and so may a simulated world. The predictor and the controller never import it: what
they are judged by must know nothing of their models.
"""
