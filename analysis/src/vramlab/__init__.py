"""Reads what the programs wrote and draws it: run records, experiments, histories, histograms.

`vramlab report RUN... -o report.html` makes a page of any run. The notebooks in
`analysis/notebooks` answer the questions of the study from the recorded results. Importing the package loads nothing
heavy; its modules do.
"""
