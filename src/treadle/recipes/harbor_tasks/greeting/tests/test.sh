#!/bin/bash
[ "$(cat /app/hello.txt 2>/dev/null)" = "Hello, world!" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
