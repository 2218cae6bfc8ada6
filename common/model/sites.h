/// \file
/// The check that each primitive makes: is this line taken out of the kernel?
#pragma once

#include "common/model/model.h"

namespace flashsteps::model {

/// Whether sites are noted or one is skipped; else primitives pay for one test alone. Changed
/// between launches only.
inline bool sites_matter = false;

bool note_site(SiteKind kind, const char* file, int line);

/// Notes the site where sites are noted.
///
/// \return whether it is taken out
inline bool skipped(SiteKind kind, const char* file, int line) {
  return sites_matter && note_site(kind, file, line);
}

}  // namespace flashsteps::model
