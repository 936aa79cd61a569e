"""Tables and figures of the paper, computed or read back. What the notebooks call:

    tables.table(label, profile, compute=False)     figures.figure(label, profile)
    layouts.summary(label, table)                   layouts.compare(table)
    provenance.provenance_table(profile)            markup.show(table)

``profile`` is "smoke", "mini", "full" or "paper". With ``compute=False`` the committed records are read and no model
runs; with ``compute=True`` whatever answers are missing are computed first. A table is a DataFrame; one that is
computed, or made by ``make tables``, is ``data/<profile>/<label>.csv`` as well.
"""
