#!/bin/sh
# Install clusterprof with a portable Python into a folder: install-agent.sh FOLDER PYTHON WHEELS
# Needs uv. The folder can be copied, as long as it lies at the same place afterwards.
set -eu
folder=$1 python=$2 wheels=$3
uv python install --no-cache --install-dir "$folder" "$python"
interpreter=$(ls "$folder"/cpython-*/bin/python3)
ln -s "${interpreter#"$folder"/}" "$folder/python3"
# numpy, which only the analysis imports, is five times the rest.
"$interpreter" -m pip install --no-cache-dir --no-compile --break-system-packages --no-warn-script-location \
    msgspec psutil nvidia-ml-py pyyaml typer rich
"$interpreter" -m pip install --no-cache-dir --no-compile --break-system-packages --no-warn-script-location --no-deps \
    "$wheels"/clusterprof-*.whl
mkdir -p "$folder/bin"
cat > "$folder/bin/clusterprof" << EOF
#!/bin/sh
exec $folder/python3 -I -m clusterprof "\$@"
EOF
chmod 755 "$folder/bin/clusterprof"
# Neither is imported by the recorder.
root=$(dirname "$(dirname "$interpreter")")
rm -rf "$root"/lib/python*/test "$root"/lib/python*/idlelib "$root"/lib/tcl* "$root"/lib/tk* \
    "$root"/lib/python*/ensurepip "$root"/include "$root"/share
"$folder/bin/clusterprof" --version
