"""Values from which a metric is called something else, in findings, sentences and drafted policies alike."""

from __future__ import annotations

FOUND_FROM, LOOK_FROM = 0.5, 0.35  # scores from which a class is found to hang on one thing, or worth looking at
CHANGED = 0.6  # correlation with explanations of a destroyed model: fine up to here
STEADY = 0.9  # mean correlation under noise from which on explanations are called steady
UNCHANGED = 0.9  # explanations that correlate more than this with those of a destroyed model do not speak of it
