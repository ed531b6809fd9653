"""Reports of ranks and nodes as values, and their bytes in rings and trace files.

In: fields measured by trainers and agents. Out: records, samples, the attachment of a rank, node
reports, and the codecs of ring slots (`record_codec`, `shm_ring`) and trace files (`trace_jsonl`).
The wire form lies in `protos/convert`.
"""
