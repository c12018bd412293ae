#!/usr/bin/env bash
# Builds .venv-vulkan: ggml-python with Vulkan beside the CPU, and swarmnode with its tests. Run it again at will.
#
# Where a Vulkan driver, new headers and glslc are there (a GPU's driver and the Vulkan SDK, Debian 13), it only
# builds. On Debian 12 it fetches what is missing, as root: Mesa's software driver from backports, and Debian 13's
# headers as files that only this build sees (docs/decisions/0012-vulkan-test-backend.md).
# Mirrors are those of the machine's own apt sources.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
VENV=.venv-vulkan
ROOT=$PWD/$VENV/vulkan       # headers, apt's lists for other suites
INCLUDE=$ROOT/usr/include
OWN_SUITE=bookworm           # Debian 12
NEWER_SUITE=trixie           # Debian 13: Vulkan 1.4 headers
ARGUMENTS="-DGGML_VULKAN=ON -DGGML_LLAMAFILE=ON -DGGML_OPENMP=OFF"
REQUIREMENT=$(grep -o 'ggml-python==[0-9.]*' pyproject.toml)

fail() { echo "setup-vulkan: $*" >&2; exit 1; }
is_debian_12() { [ -r /etc/os-release ] && (. /etc/os-release && [ "${ID:-}:${VERSION_ID:-}" = debian:12 ]); }

# The first mirror of the distribution itself in apt's own settings.
mirror() { apt-get --print-uris update | sed -n "s|^'\(.*\)/dists/$OWN_SUITE/InRelease'.*|\1|p" | head -n 1; }

# apt-get with packages of `suite` beside the system's; its lists are kept apart, so the system's stay as they are.
apt_with() {
    local suite=$1; shift
    local parts=$ROOT/apt/$suite/sources.list.d lists=$ROOT/apt/$suite/lists
    local key=/usr/share/keyrings/debian-archive-keyring.gpg
    local options=(-o "Dir::Etc::sourceparts=$parts" -o "Dir::State::lists=$lists" -o APT::Sandbox::User=root)
    if [ ! -d "$lists" ]; then
        mkdir -p "$parts" "$lists"
        cp /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list "$parts" 2>/dev/null || true
        [ "$suite" = "$OWN_SUITE" ] || echo "deb [signed-by=$key] $(mirror) $suite main" > "$parts/more.list"
        apt-get "${options[@]}" -qq update || { rm -rf "$lists"; fail "apt cannot read the suite $suite"; }
    fi
    apt-get "${options[@]}" "$@"
}

apt_install() { # suite, packages
    local suite=$1; shift
    is_debian_12 || fail "missing: $*. Install your system's packages for them (on Debian and Ubuntu: glslc" \
                         "libvulkan-dev spirv-headers mesa-vulkan-drivers), or your GPU's driver and the Vulkan SDK."
    [ "$(id -u)" = 0 ] || fail "missing: $*. Run this once as root: it installs them with apt."
    echo "installing $* ..."
    DEBIAN_FRONTEND=noninteractive apt_with "$suite" -qq -y --no-install-recommends -t "$suite" install "$@" >/dev/null
}

has_driver() {
    compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null || compgen -G '/etc/vulkan/icd.d/*.json' >/dev/null
}
has_loader() { ldconfig -p 2>/dev/null | grep 'libvulkan\.so ' >/dev/null || [ -n "${VULKAN_SDK:-}" ]; }

# ggml names what Vulkan's C++ headers have since 1.3.296 or so.
has_headers() {
    printf '#include <vulkan/vulkan.hpp>\n#include <spirv/unified1/spirv.hpp>\nvk::LayerSettingEXT probe;\n' |
        c++ -std=c++17 -fsyntax-only -x c++ "$@" - 2>/dev/null
}

fetch_headers() {
    is_debian_12 || fail "the Vulkan headers are missing or too old (vk::LayerSettingEXT is needed): install" \
                         "the Vulkan SDK, or newer libvulkan-dev and spirv-headers"
    echo "fetching newer headers ..."
    mkdir -p "$ROOT/packages"
    (cd "$ROOT/packages" &&
     apt_with "$NEWER_SUITE" -qq download "libvulkan-dev/$NEWER_SUITE" "spirv-headers/$NEWER_SUITE")
    for package in "$ROOT"/packages/*.deb; do dpkg -x "$package" "$ROOT"; done
    has_headers -isystem "$INCLUDE" || fail "the fetched headers do not compile"
}

has_driver || apt_install "$OWN_SUITE-backports" mesa-vulkan-drivers
has_loader || apt_install "$OWN_SUITE" libvulkan-dev
command -v glslc >/dev/null || apt_install "$OWN_SUITE" glslc

installed() {
    "$VENV/bin/python" -c 'from importlib.metadata import version; print("ggml-python==" + version("ggml-python"))' 2>/dev/null
}

STAMP=$VENV/.ready
if [ "$(cat "$STAMP" 2>/dev/null)" != "$REQUIREMENT" ] || [ pyproject.toml -nt "$STAMP" ]; then
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
    if [ ! -e "$VENV/.built" ] || [ "$(installed)" != "$REQUIREMENT" ]; then
        if ! has_headers; then
            has_headers -isystem "$INCLUDE" || fetch_headers
            export CPATH=$INCLUDE${CPATH:+:$CPATH} CMAKE_PREFIX_PATH=$ROOT/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
            ARGUMENTS+=" -DVulkan_INCLUDE_DIR=$INCLUDE"
        fi
        echo "building ggml with Vulkan (about five minutes on two cores) ..."
        CMAKE_ARGS=$ARGUMENTS "$VENV/bin/python" -m pip install --quiet --no-cache-dir --force-reinstall --no-deps \
            --no-binary ggml-python "$REQUIREMENT" || fail "ggml did not build with $ARGUMENTS; see the lines above"
        touch "$VENV/.built"
    fi
    "$VENV/bin/python" -m pip install --quiet --editable '.[backbone,dev]'
    echo "$REQUIREMENT" > "$STAMP"
fi

# ggml passes over drivers that run on the CPU unless told which device to take.
GGML_VK_VISIBLE_DEVICES=${GGML_VK_VISIBLE_DEVICES:-0} "$VENV/bin/python" - <<'PROGRAM' ||
import sys
from swarmnode.compute.devices import list_devices
found = [info for info in list_devices() if info.name.startswith("Vulkan")]
for info in found:
    print(f"{info.name}: {info.description}")
sys.exit(not found)
PROGRAM
    fail "this ggml finds no Vulkan device: is a driver installed (vulkaninfo --summary)?"
