"""What runs show: comparisons, verdicts, tables, figures and pages."""
