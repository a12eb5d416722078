"""Published methods behind one protocol, judged on the same recordings: baseline.py first, registry.py lists them."""
