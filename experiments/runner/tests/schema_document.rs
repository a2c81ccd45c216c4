//! Generates the tables of `analysis/schema.md` and `app/cli/schema.md` from the serialised types: `UPDATE_SCHEMA=1
//! cargo test -p experiments --test all schema_document` writes them; without the variable the test checks that they
//! are up to date.
//!
//! A comment in the document names the type of a table: `fields of Summary in trainer/src/record.rs`, or `values of`
//! an enumeration. Keys, types and optionality are read from the declarations and their serde attributes, the meaning
//! from the documentation. Types without a table are spread out in the tables of the types that contain them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use syn::parse::{ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::{
    Attribute, Expr, Fields, GenericArgument, Generics, Item, ItemEnum, Lit, LitStr, Meta, PathArguments, Token, Type,
    Variant,
};

/// The documents with generated tables.
const DOCUMENTS: [&str; 2] = ["analysis/schema.md", "app/cli/schema.md"];

/// Directories with the serialised types.
const FOLDERS: [&str; 8] = [
    "allocators/device",
    "allocators/policies",
    "allocators/histories",
    "trainer",
    "app/terminal",
    "app/cli",
    "app/nsight",
    "experiments/runner",
];

/// Types and functions with custom serialisation, and the JSON that they write.
const WRITTEN: [(&str, &str); 12] = [
    ("Selection", "string"),
    ("Conf", "string"),
    ("DeviceChoice", "string"),
    ("Action", "string"),
    ("Path", "string"),
    ("is_on", "boolean"),
    ("Value", "any"),
    ("Map", "object"),
    ("Entries", "object"),
    ("as_map", "object"),
    ("Stats", "object"),
    ("PooledGauge", "gauge"),
];

/// A struct or an enumeration, and the file that declares it.
struct Declared {
    file: PathBuf,
    item: Item,
}

struct Types(BTreeMap<String, Vec<Declared>>);

/// A row of a table.
struct Row {
    key: String,
    kind: String,
    optional: bool,
    meaning: String,
}

/// The arguments of a generic type, by parameter name.
type Arguments = BTreeMap<String, Type>;

impl Types {
    fn read(root: &Path) -> Self {
        let mut types = Self(BTreeMap::new());
        let mut folders: Vec<PathBuf> = FOLDERS.iter().map(|folder| root.join(folder).join("src")).collect();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = std::fs::read_to_string(&path).unwrap();
                    let file = syn::parse_file(&text).unwrap();
                    types.declare(path.strip_prefix(root).unwrap(), file.items);
                }
            }
        }
        types
    }

    fn declare(&mut self, file: &Path, items: Vec<Item>) {
        for item in items {
            let item = match item {
                Item::Macro(item) if item.mac.path.segments.last().is_some_and(|last| last.ident == "named") => {
                    Item::Enum(item.mac.parse_body_with(named).unwrap())
                }
                item => item,
            };
            let name = match &item {
                Item::Struct(item) => item.ident.to_string(),
                Item::Enum(item) => item.ident.to_string(),
                _ => continue,
            };
            self.0.entry(name).or_default().push(Declared { file: file.to_owned(), item });
        }
    }

    /// The type of this name as seen from a file: the file's own, or else the only serialised one.
    fn find(&self, name: &str, file: &Path) -> Option<&Declared> {
        let all = self.0.get(name)?;
        if let Some(local) = all.iter().find(|declared| declared.file == file) {
            return Some(local);
        }
        let text = std::fs::read_to_string(root().join(file)).unwrap();
        let module = |declared: &&Declared| {
            let stem = declared.file.file_stem().unwrap().to_string_lossy();
            text.contains(&format!("{stem}::{name}")) || text.contains(&format!("{stem}::{{"))
        };
        let serialised: Vec<&Declared> = all.iter().filter(|declared| serialised(&declared.item)).collect();
        match serialised.as_slice() {
            [] => None,
            [one] => Some(one),
            several => {
                let named: Vec<_> = several.iter().copied().filter(module).collect();
                assert_eq!(
                    named.len(),
                    1,
                    "{}: which {name}? {:?}",
                    file.display(),
                    several.iter().map(|d| &d.file).collect::<Vec<_>>()
                );
                Some(named[0])
            }
        }
    }
}

/// The enumeration that `named!` declares, with the serde names of its variants.
fn named(input: ParseStream) -> syn::Result<ItemEnum> {
    let (attrs, vis) = (input.call(Attribute::parse_outer)?, input.parse()?);
    let (enum_token, ident) = (input.parse()?, input.parse()?);
    let kinds;
    let brace_token = syn::braced!(kinds in input);
    let mut variants = Punctuated::new();
    while !kinds.is_empty() {
        let (mut attrs, ident) = (kinds.call(Attribute::parse_outer)?, kinds.parse()?);
        let name = kinds.parse::<LitStr>()?.value();
        attrs.extend(Attribute::parse_outer.parse_str(&format!("#[serde(rename = {name:?})]"))?);
        variants.push(Variant { attrs, ident, fields: Fields::Unit, discriminant: None });
        kinds.parse::<Token![,]>()?;
    }
    Ok(ItemEnum { attrs, vis, enum_token, ident, generics: Generics::default(), brace_token, variants })
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Struct(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        _ => &[],
    }
}

fn serialised(item: &Item) -> bool {
    let mut is_serialized = false;
    for attribute in attributes(item).iter().filter(|attribute| attribute.path().is_ident("derive")) {
        let _ = attribute.parse_nested_meta(|meta| {
            is_serialized |= meta.path.segments.last().is_some_and(|last| last.ident == "Serialize");
            Ok(())
        });
    }
    is_serialized
}

/// The serde attributes by name; those without a value have an empty one.
fn serde(attributes: &[Attribute]) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("serde")) {
        attribute
            .parse_nested_meta(|meta| {
                let value =
                    if meta.input.peek(Token![=]) { meta.value()?.parse::<LitStr>()?.value() } else { String::new() };
                out.insert(meta.path.get_ident().unwrap().to_string(), value);
                Ok(())
            })
            .unwrap();
    }
    out
}

/// The documentation in one line, without its last full stop and without links to code.
fn documentation(attributes: &[Attribute]) -> String {
    let mut lines = Vec::new();
    for attribute in attributes {
        if let Meta::NameValue(value) = &attribute.meta
            && value.path.is_ident("doc")
            && let Expr::Lit(text) = &value.value
            && let Lit::Str(text) = &text.lit
        {
            lines.push(text.value().trim().to_owned());
        }
    }
    let text = lines.join(" ").trim().replace("[`", "`").replace("`]", "`").replace('|', "\\|");
    // The remainder of `[text](Self::item)` where the text was code.
    let mut out = String::new();
    for (number, part) in text.split("`(").enumerate() {
        let code =
            part.split_once(')').filter(|(code, _)| number > 0 && (code.contains("::") || code.contains("crate")));
        match (number, code) {
            (0, _) => out.push_str(part),
            (_, Some((_, rest))) => out.push_str(&format!("`{rest}")),
            (_, None) => out.push_str(&format!("`({part}")),
        }
    }
    out.strip_suffix('.').unwrap_or(&out).to_owned()
}

fn renamed(name: &str, rule: Option<&String>) -> String {
    let words = |separator: &str| {
        let mut out = String::new();
        for letter in name.chars() {
            if letter.is_uppercase() && !out.is_empty() {
                out.push_str(separator);
            }
            out.extend(letter.to_lowercase());
        }
        out
    };
    match rule.map(String::as_str) {
        None => name.to_owned(),
        Some("lowercase") => name.to_lowercase(),
        Some("snake_case") => words("_"),
        Some("kebab-case") => words("-"),
        Some(other) => panic!("{name}: names in {other} are not known here"),
    }
}

/// Values of an enumeration and their documentation.
fn values(item: &Item) -> Vec<(String, String)> {
    match item {
        Item::Enum(item) => {
            let rule = serde(&item.attrs);
            let of = |variant: &Variant| {
                let name = serde(&variant.attrs).remove("rename");
                name.unwrap_or_else(|| renamed(&variant.ident.to_string(), rule.get("rename_all")))
            };
            item.variants.iter().map(|variant| (of(variant), documentation(&variant.attrs))).collect()
        }
        _ => panic!("no enumeration"),
    }
}

/// A document and the types of its tables.
struct Document<'a> {
    types: &'a Types,
    /// The document and the heading of each table, by file and name of its type.
    tables: &'a BTreeMap<(PathBuf, String), (&'static str, String)>,
    /// The document whose tables are written.
    path: &'static str,
    /// Types that are currently being spread out.
    open: RefCell<Vec<String>>,
}

impl Document<'_> {
    /// Rows of a type's fields; `before` is the path of the object that contains them.
    fn fields(&self, declared: &Declared, arguments: &Arguments, before: &str, rows: &mut Vec<Row>) {
        let fields = match &declared.item {
            Item::Struct(item) => vec![(&item.fields, false)],
            // Untagged: the fields of one of the variants.
            Item::Enum(item) => item.variants.iter().map(|variant| (&variant.fields, true)).collect(),
            _ => panic!("no type with fields"),
        };
        for (fields, one_of) in fields {
            for field in fields {
                let attributes = serde(&field.attrs);
                if attributes.contains_key("skip") {
                    continue;
                }
                let kind = attributes
                    .get("serialize_with")
                    .map_or_else(|| field.ty.clone(), |name| syn::parse_str(name).unwrap());
                if attributes.contains_key("flatten") || field.ident.is_none() {
                    let (inner, arguments) = self.inner(&kind, arguments);
                    // A parameter, in the table of a generic type.
                    let Some(declared) = self.types.find(&inner, &declared.file) else { continue };
                    let from = rows.len();
                    if let Some(link) = self.link(declared, "these keys") {
                        let meaning = documentation(&field.attrs);
                        rows.push(Row { key: below(before, "…"), kind: link, optional: false, meaning });
                        self.of_parameters(&arguments, &declared.file, before, rows);
                    } else {
                        self.fields(declared, &arguments, before, rows);
                    }
                    let optional = one_of || attributes.contains_key("skip_serializing_if");
                    rows[from..].iter_mut().for_each(|row| row.optional |= optional);
                    continue;
                }
                let name =
                    attributes.get("rename").cloned().unwrap_or_else(|| field.ident.as_ref().unwrap().to_string());
                let meaning = documentation(&field.attrs);
                let optional = one_of || attributes.contains_key("skip_serializing_if");
                let key = below(before, &name);
                self.row(&kind, arguments, Row { key, kind: String::new(), optional, meaning }, &declared.file, rows);
            }
        }
    }

    /// A link to the table of a type, if it has one.
    fn link(&self, declared: &Declared, text: &str) -> Option<String> {
        let name = match &declared.item {
            Item::Struct(item) => &item.ident,
            Item::Enum(item) => &item.ident,
            _ => return None,
        };
        let (path, heading) = self.tables.get(&(declared.file.clone(), name.to_string()))?;
        let up = "../".repeat(self.path.matches('/').count());
        let file = if *path == self.path { String::new() } else { format!("{up}{path}") };
        Some(format!("[{text}]({file}#{})", anchor(heading)))
    }

    /// Rows that the arguments of a generic type add to its table.
    fn of_parameters(&self, arguments: &Arguments, file: &Path, before: &str, rows: &mut Vec<Row>) {
        for kind in arguments.values() {
            let (name, arguments) = self.inner(kind, &Arguments::new());
            self.fields(self.types.find(&name, file).unwrap(), &arguments, before, rows);
        }
    }

    /// The name of a type and the arguments for its parameters.
    fn inner(&self, kind: &Type, arguments: &Arguments) -> (String, Arguments) {
        let path = match kind {
            Type::Reference(reference) => return self.inner(&reference.elem, arguments),
            Type::Path(path) => path,
            _ => panic!("no name of a type"),
        };
        let last = path.path.segments.last().unwrap();
        let name = last.ident.to_string();
        if let Some(argument) = arguments.get(&name) {
            return self.inner(argument, &Arguments::new());
        }
        let given = parameters(&last.arguments);
        if name == "Option" {
            return self.inner(&given[0], arguments);
        }
        let of = |generics: &Generics| {
            generics.type_params().map(|parameter| parameter.ident.to_string()).collect::<Vec<_>>()
        };
        let names = self.types.0.get(&name).into_iter().flatten().find_map(|declared| match &declared.item {
            Item::Struct(item) => Some(of(&item.generics)),
            _ => None,
        });
        (name, names.unwrap_or_default().into_iter().zip(given).collect())
    }

    /// The row of a key, and those of its value's fields.
    fn row(&self, kind: &Type, arguments: &Arguments, mut row: Row, file: &Path, rows: &mut Vec<Row>) {
        let with = |row: Row, suffix: &str| Row { key: row.key + suffix, ..row };
        let path = match kind {
            Type::Reference(reference) => return self.row(&reference.elem, arguments, row, file, rows),
            Type::Slice(slice) => return self.row(&slice.elem, arguments, with(row, "[]"), file, rows),
            Type::Array(array) => return self.row(&array.elem, arguments, with(row, "[]"), file, rows),
            Type::Tuple(tuple) => {
                let parts: Vec<String> = tuple.elems.iter().map(|part| self.name(part, file)).collect();
                row.kind = format!("[{}]", parts.join(", "));
                rows.push(row);
                return;
            }
            Type::Path(path) => &path.path,
            _ => panic!("{}: {} is of a type that is not known here", file.display(), row.key),
        };
        let last = path.segments.last().unwrap();
        let (name, given) = (last.ident.to_string(), parameters(&last.arguments));
        if let Some(argument) = arguments.get(&name) {
            return self.row(argument, &Arguments::new(), row, file, rows);
        }
        match name.as_str() {
            "Vec" => self.row(&given[0], arguments, with(row, "[]"), file, rows),
            "Option" => {
                let (at, optional) = (rows.len(), row.optional);
                self.row(&given[0], arguments, row, file, rows);
                if !optional {
                    rows[at].kind += " or null";
                }
            }
            "BTreeMap" => self.row(&given[1], arguments, with(row, ".<name>"), file, rows),
            "CallCounts" => {
                self.row(&syn::parse_str("CallTotals").unwrap(), arguments, with(row, ".<call>"), file, rows)
            }
            _ => {
                row.kind = self.name(kind, file);
                let declared = self.types.find(&name, file).filter(|_| row.kind == "object");
                let at = rows.len();
                rows.push(row);
                let Some(declared) = declared.filter(|declared| serialised(&declared.item)) else {
                    if let Some(declared) = self.types.0.get(&name).and_then(|_| self.types.find(&name, file))
                        && rows[at].kind == "string"
                        && serialised(&declared.item)
                    {
                        self.list_values(declared, &mut rows[at]);
                    }
                    return;
                };
                match self.link(declared, "object") {
                    Some(link) => {
                        let key = rows[at].key.clone();
                        rows[at].kind = link;
                        let (_, arguments) = self.inner(kind, arguments);
                        self.of_parameters(&arguments, &declared.file, &key, rows);
                    }
                    // A recursive type is not spread out again.
                    None if self.open.borrow().contains(&name) => {}
                    None => {
                        let (_, arguments) = self.inner(kind, arguments);
                        let key = rows[at].key.clone();
                        self.open.borrow_mut().push(name);
                        self.fields(declared, &arguments, &key, rows);
                        self.open.borrow_mut().pop();
                    }
                }
            }
        }
    }

    /// Lists the values of an enumeration that has no table, if the meaning does not.
    fn list_values(&self, declared: &Declared, row: &mut Row) {
        if let Some(link) = self.link(declared, "string") {
            row.kind = link;
            return;
        }
        let names: Vec<String> = values(&declared.item).into_iter().map(|(name, _)| format!("`{name}`")).collect();
        if !names.iter().all(|name| row.meaning.contains(name)) {
            row.meaning = format!("{}: {}", row.meaning, names.join(", "));
        }
    }

    /// JSON's name of a type.
    fn name(&self, kind: &Type, file: &Path) -> String {
        let Type::Path(path) = kind else {
            if let Type::Reference(reference) = kind {
                return self.name(&reference.elem, file);
            }
            panic!("{}: a type that is not known here", file.display())
        };
        let name = path.path.segments.last().unwrap().ident.to_string();
        if let Some((_, written)) = WRITTEN.iter().find(|(of, _)| *of == name) {
            return (*written).to_owned();
        }
        match name.as_str() {
            "String" | "str" | "PathBuf" => "string",
            "bool" => "boolean",
            "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" => "integer",
            "f32" | "f64" => "number",
            _ => match self.types.find(&name, file).map(|declared| &declared.item) {
                Some(Item::Enum(item))
                    if item.variants.iter().all(|variant| matches!(variant.fields, Fields::Unit)) =>
                {
                    "string"
                }
                Some(_) => "object",
                None => panic!("{}: what does {name} write?", file.display()),
            },
        }
        .to_owned()
    }

    /// A document with its tables regenerated from the types.
    fn rewritten(&self, text: &str) -> String {
        let mut out = String::new();
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            out.push_str(line);
            out.push('\n');
            let Some((what, name, file)) = marker(line) else { continue };
            // Below the comment are an empty line, the old table, and an empty line.
            lines.next();
            while lines.next_if(|line| line.contains(" | ")).is_some() {}
            lines.next_if(|line| line.is_empty());
            let declared = self.types.0.get(name).into_iter().flatten().find(|declared| declared.file == file);
            let declared = declared.unwrap_or_else(|| panic!("there is no {name} in {}", file.display()));
            out.push_str(&format!("\n{}", self.table(what, declared)));
            if lines.peek().is_some() {
                out.push('\n');
            }
        }
        out
    }

    fn table(&self, what: &str, declared: &Declared) -> String {
        let mut out = String::new();
        if what == "values" {
            out.push_str("value | meaning\n--- | ---\n");
            for (name, meaning) in values(&declared.item) {
                out.push_str(&format!("`{name}` | {meaning}\n"));
            }
            return out;
        }
        let mut rows = Vec::new();
        self.fields(declared, &Arguments::new(), "", &mut rows);
        out.push_str("key | type | meaning\n--- | --- | ---\n");
        // Keys without a meaning share one row.
        let alike = |one: &Row, next: &Row| {
            (&one.kind, one.optional) == (&next.kind, next.optional)
                && one.meaning.is_empty()
                && next.meaning.is_empty()
        };
        for rows in rows.chunk_by(alike) {
            let keys: Vec<String> = rows.iter().map(|row| format!("`{}`", row.key)).collect();
            let optional = if rows[0].optional { ", optional" } else { "" };
            let row = format!("{} | {}{optional} | {}", keys.join(", "), rows[0].kind, rows[0].meaning);
            out.push_str(row.trim_end());
            out.push('\n');
        }
        out
    }
}

/// The path of a key of the object at `before`.
fn below(before: &str, key: &str) -> String {
    if before.is_empty() { key.to_owned() } else { format!("{before}.{key}") }
}

fn parameters(arguments: &PathArguments) -> Vec<Type> {
    let PathArguments::AngleBracketed(given) = arguments else { return Vec::new() };
    let types = given.args.iter().filter_map(|argument| match argument {
        GenericArgument::Type(kind) => Some(kind.clone()),
        _ => None,
    });
    types.collect()
}

fn anchor(heading: &str) -> String {
    heading.to_lowercase().replace(' ', "-").replace(['.', '`', '\''], "")
}

/// The parts of `<!-- fields of Summary in trainer/src/record.rs -->`.
fn marker(line: &str) -> Option<(&str, &str, &Path)> {
    let line = line.strip_prefix("<!-- ")?.strip_suffix(" -->")?;
    let (what, rest) = line.split_once(" of ")?;
    let (name, file) = rest.split_once(" in ")?;
    Some((what, name, Path::new(file)))
}

#[test]
fn tables_match_the_types() {
    let texts = DOCUMENTS.map(|path| std::fs::read_to_string(root().join(path)).unwrap());
    let types = Types::read(&root());
    let mut tables = BTreeMap::new();
    for (path, text) in DOCUMENTS.into_iter().zip(&texts) {
        let mut heading = "";
        for line in text.lines() {
            if line.starts_with('#') {
                heading = line.trim_start_matches('#').trim();
            } else if let Some((_, name, file)) = marker(line) {
                tables.insert((file.to_owned(), name.to_owned()), (path, heading.to_owned()));
            }
        }
    }
    for (path, text) in DOCUMENTS.into_iter().zip(&texts) {
        let document = Document { types: &types, tables: &tables, path, open: RefCell::default() };
        let out = document.rewritten(text);
        if std::env::var_os("UPDATE_SCHEMA").is_some() {
            std::fs::write(root().join(path), out).unwrap();
        } else if let Some((old, new)) = text.lines().zip(out.lines()).find(|(old, new)| old != new) {
            panic!("{path} is out of date; run with UPDATE_SCHEMA=1:\n  actual:   {old}\n  expected: {new}");
        } else {
            assert_eq!(text.len(), out.len(), "{path} is out of date; run with UPDATE_SCHEMA=1");
        }
    }
}
