"""Reads what the programs wrote and draws it: run records, experiments, histories, histograms.

The notebooks in `analysis/notebooks` answer the questions of the study from the recorded results. Importing the package
loads nothing heavy; its modules do.
"""
