"""Commands that analyse without a controller: replay (recorded runs), simulate (failures).

In: trace files of any supported format, or a scenario in TOML. Out: findings or goodput, as text,
JSON or one HTML page. `*_text` print, `*_report` and `*_figures` draw pages; `html` is what pages
share. The analysis itself is in `predictor.recorded` and `simulator`.
"""
