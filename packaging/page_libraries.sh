#!/bin/sh
# Fetches the libraries of the page at `/` again, checks them, and writes src/penstock/serve/page/vendor. Needs npm.
# For a new version: change the version and its integrity (`npm view NAME@VERSION dist.integrity`) below.
set -eu
vendor=$(cd "$(dirname "$0")/../src/penstock/serve/page" && pwd)/vendor
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# fetch NAME VERSION INTEGRITY FOLDER: unpack a package into $work/FOLDER, if its SHA-512 is the one given.
fetch() {
  archive=$(cd "$work" && npm pack --silent "$1@$2")
  found=sha512-$(openssl dgst -sha512 -binary "$work/$archive" | base64 -w0)
  [ "$found" = "$3" ] || { echo "error: $1@$2 has the checksum $found, and not $3." >&2; exit 1; }
  mkdir "$work/$4"
  tar -xzf "$work/$archive" -C "$work/$4" --strip-components=1
}

fetch @highlightjs/cdn-assets 11.12.0 \
  sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw== highlight
fetch temml 0.13.5 \
  sha512-aPkDDgunanpLNL0ql32HbolqLep+w8DRcVXRql7rWrMt/PhczdLgL4UBYYVU3BYjCNjkGq4EqwIicu/zWr1iOg== temml

rm -rf "$vendor"
mkdir -p "$vendor/highlight" "$vendor/temml"
cp "$work/highlight/LICENSE" "$work/highlight/es/core.min.js" "$vendor/highlight"
for language in bash cpp csharp diff dockerfile go ini java json makefile python rust shell sql typescript xml yaml; do
  cp "$work/highlight/es/languages/$language.min.js" "$vendor/highlight"
done
cp "$work/temml/LICENSE" "$work/temml/dist/temml.min.js" "$vendor/temml"
# Published as a classic script. The page loads it as a module, since its policy lets no script add a script element.
echo "export default temml;" >> "$vendor/temml/temml.min.js"

cd "$vendor"
find . -type f ! -name checksums.txt | LC_ALL=C sort | xargs sha256sum > checksums.txt
