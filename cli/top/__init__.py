"""`pacekeeper top`: a live screen of jobs, ranks and incidents, with keys for operators.

In: the status and operator services, polled by `source`. Out: a textual application (`app`) whose
rows and header come from `rows`. Nothing is stored; every act is confirmed first.
"""
