"""The detector of live jobs.

Input: one step's samples of all ranks (`update`). Output: the next detector state, new findings
and changes of open ones. CUSUM charts run on log residuals of the cost model.
"""
