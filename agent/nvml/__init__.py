"""Samples of the node's GPUs by NVML; the only package that imports it.

`sampler` runs a thread that queries all devices by `client` and keeps the newest `DeviceSample`s;
`xid_events` listens for Xids in a second thread. No other thread waits for either of them.
"""
