#!/bin/bash
# two parts: it runs for N = 1, and it is right for others
one=0 all=0
[ "$(bash /app/squares.sh 1 2>/dev/null)" = "1" ] && one=1
[ "$(bash /app/squares.sh 4 2>/dev/null)" = "$(printf '1\n4\n9\n16')" ] && [ "$(bash /app/squares.sh 12 2>/dev/null | tail -n 1)" = "144" ] && all=1
echo "{\"reward\": $all, \"runs\": $one}" > /logs/verifier/reward.json
