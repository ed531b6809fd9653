"""Commands that query a controller: status, incidents, explain, fleet.

In: answers of the status service. Out: tables and lines for people (`*_text`), JSON, a PNG plot of
an incident. These commands change nothing; `operate` holds those that do.
"""
