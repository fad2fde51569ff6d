#!/bin/bash
right="$(find /usr/bin -maxdepth 1 -type f -printf '%s %f\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-)"
[ "$(cat /app/answer.txt 2>/dev/null)" = "$right" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
