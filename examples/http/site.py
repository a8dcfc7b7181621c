"""A site of a run over plain HTTP: `python site.py PLAN KEYS DATA STORE [URL]`.

Its name is that of its keys. The store is made at the first start; a restart with the same words goes on.
"""

import sys
import time
from pathlib import Path
from urllib.request import urlopen

import veilstream as vs

plan, keys, data, store, *url = sys.argv[1:]
address = f"{url[0] if url else 'http://127.0.0.1:8400'}/{Path(keys).name}"

with vs.Site.open(vs.Plan.load(plan), store, data, keys=keys, create=True) as site:
    print(site.learner.guarantee)
    while not site.dismissed:
        try:
            request = urlopen(address, timeout=60).read()
            if request:
                urlopen(address, data=site.answer(request), timeout=60).close()
            else:
                time.sleep(0.2)
        except OSError:  # the server is away, or did not take the reply: it asks again
            time.sleep(1.0)
