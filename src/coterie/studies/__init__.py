"""Studies: several comparisons as the columns of one table, and the papers' tables as cards.

``study`` describes a study, ``cells`` runs what is missing of it, ``cell_record`` is what stays of
a run, ``outcome`` computes the table and judges the claims. ``card_file`` reads a card: a study
with a paper's numbers and claims. ``tuning`` searches hyper-parameters on validation data.
"""
