"""What people read: the audit's page, the gate's summary, the picture of drift.

May use: release and what it may use, study, pages.
"""
