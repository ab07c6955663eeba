"""Evaluation results → tables, plots and self-contained HTML pages."""
